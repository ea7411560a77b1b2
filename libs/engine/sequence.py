"""One request inside an engine: `num_computed` of `num_tokens`. There is no phase flag.

tokens      |--------- prompt ---------|-- generated --|
            |0        num_prompt_tokens|     num_tokens|
KV          |######## num_computed ####|......|
blocks      | b0 | b1 | b2 | ...            blocks[i] holds tokens i*block_size ...
names       | n0 | n1 | n2 |                names[i] exists once block i is full and computed
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from libs.wire.messages import Cached, FinishReason, Limits, Sampling


class Status(Enum):
    HELD = "held"  # outside the scheduler: its KV is being pulled
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one request in one engine. Only the event loop's thread touches it."""

    request_id: str
    root: bytes  # parent name of its first block (model, layout, tenant)
    tokens: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    limits: Limits
    deadline_ns: int  # ns since 1970
    num_computed: int = 0  # tokens whose KV stands in `blocks`
    num_cached: int = 0  # prompt tokens that were found or pulled, not computed
    num_from_peer: int = 0  # of these
    num_from_store: int = 0  # of these
    miss: str = ""  # why less was cached than was promised
    tenant: str = ""  # whose blocks its are
    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    status: Status = Status.HELD

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def cached(self) -> Cached:
        return Cached(
            tokens=self.num_cached,
            from_peer=self.num_from_peer,
            from_store=self.num_from_store,
            miss=self.miss,
        )

    @cached.setter
    def cached(self, cached: Cached) -> None:
        """What another engine found of this prompt."""
        self.num_cached, self.miss = cached.tokens, cached.miss
        self.num_from_peer, self.num_from_store = cached.from_peer, cached.from_store

    def append(self, token_id: int) -> FinishReason | None:
        """Adds a generated token; returns why the sequence ends with it, or None."""
        self.tokens.append(token_id)
        if token_id in self.limits.stop_token_ids and not self.limits.ignore_eos:
            return "stop"
        return "length" if self.num_generated >= self.limits.max_tokens else None
