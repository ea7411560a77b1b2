"""Moving KV blocks between pools, by whatever way two workers have in common.

A holder *exports* its pool under an endpoint URL; a puller opens a *link* to it and copies blocks into its own
pool. Leases, names and order are the callers' business: a link moves bytes, and that a copy went through says
nothing about whether the holder is alive or the blocks were still leased (`Released.live` says that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from libs.wire.errors import BatonError, Code

Copy = tuple[int, int]  # (block of the holder's pool, block of one's own)


class TransferError(BatonError):
    """A pull that did not happen. The caller computes the blocks itself, or tries elsewhere."""

    code = Code.KV_UNAVAILABLE
    retryable = True


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """What a holder says of its pool before a byte moves."""

    worker_id: str
    epoch: int
    layout: str
    num_blocks: int
    num_bytes: int


class Exporter(Protocol):
    """Lets peers reach a pool."""

    @property
    def endpoint(self) -> str: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class Link(Protocol):
    """A way from one peer's pool into one's own. Calls block: they run on a transfer thread."""

    info: PoolInfo

    def pull(self, copies: Sequence[Copy]) -> None:
        """Copies whole blocks. Raises TransferError; blocks copied by then hold unknown bytes."""
        ...

    def close(self) -> None: ...
