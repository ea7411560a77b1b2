"""Offering a prompt's blocks to the decode worker, chunk by chunk, under one lease.

    engine      |--- chunk 0 ---|--- chunk 1 ---|-- chunk 2 --|  first token
    offers       blocks 0..31    blocks 32..63    blocks 64..79 (last one partly filled), first token

A block is offered once it is full, the partly filled last one with the first token. The lease is opened with the
first offer and renewed with each further one; it ends with the decode worker's Release, or by itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from libs.engine.kv.layout import KvLayout
from libs.engine.kv.leases import LeaseTable
from libs.engine.sequence import Sequence
from libs.wire.messages import FirstToken, Offer, PoolRef, Token


@dataclass(slots=True)
class Handoff:
    """The offers of one sequence. `num_offered` blocks are under lease and known to the decode worker."""

    request_id: str
    attempt: int
    num_offered: int = 0
    lease_id: str = field(default="")


class Offers:
    """Makes offers for the sequences of one prefill worker."""

    def __init__(self, leases: LeaseTable, layout: KvLayout, pool: PoolRef, lease_s: float) -> None:
        self._leases = leases
        self._layout = layout
        self._pool = pool
        self._lease_s = lease_s

    def progress(self, handoff: Handoff, seq: Sequence) -> Offer | None:
        """The blocks that have filled since the last offer, if any. Call before `seq` gives blocks back."""
        full = min(seq.num_computed, seq.num_prompt_tokens) // self._layout.block_size
        if full <= handoff.num_offered:
            return None
        return self._offer(handoff, seq, full, full * self._layout.block_size, None)

    def final(self, handoff: Handoff, seq: Sequence, token: Token, computed_ns: int) -> Offer:
        """All the rest of the prompt, and the first token."""
        first = FirstToken(token=token, cached=seq.cached, computed_ns=computed_ns)
        end = self._layout.blocks_for(seq.num_prompt_tokens)
        return self._offer(handoff, seq, end, seq.num_prompt_tokens, first)

    def withdraw(self, handoff: Handoff) -> None:
        """Nobody will pull: gives the blocks back. Idempotent."""
        if handoff.lease_id:
            self._leases.release(handoff.lease_id)

    def _offer(
        self, handoff: Handoff, seq: Sequence, end_block: int, num_tokens: int, first: FirstToken | None
    ) -> Offer:
        now_s = time.monotonic()
        if not handoff.lease_id:
            handoff.lease_id = self._leases.open(now_s, self._lease_s)
        start = handoff.num_offered
        blocks = seq.blocks[start:end_block]
        self._leases.add(handoff.lease_id, blocks)
        self._leases.renew(handoff.lease_id, now_s, self._lease_s)
        handoff.num_offered = end_block
        return Offer(
            request_id=handoff.request_id,
            attempt=handoff.attempt,
            pool=self._pool,
            lease_id=handoff.lease_id,
            first_block=start,
            block_ids=tuple(blocks),
            num_tokens=num_tokens,
            first=first,
        )
