"""Moving KV blocks between pools, by whatever way two workers have in common.

A holder *exports* its pool under an endpoint URL for each way (transport); a puller opens a *link* to one of them and
copies blocks into its own pool. Leases, names and order are the callers' business: a link moves bytes, and that a copy
went through says nothing about whether the holder is alive or the blocks were still leased (`Released.live` says that).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from libs.engine.kv.pool import KvPool
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

    def check(self, own: KvPool) -> None:
        """Raises TransferError where its blocks do not fit `own`."""
        layout = own.layout
        if self.layout != layout.fingerprint:
            raise TransferError(f"{self.worker_id} has KV layout {self.layout}, not {layout.fingerprint}")
        if self.num_bytes != self.num_blocks * layout.block_bytes:
            raise TransferError(
                f"{self.worker_id} describes {self.num_blocks} blocks in {self.num_bytes} bytes"
            )


@dataclass(frozen=True, slots=True)
class Place:
    """Where an exporter may listen. `host`: address to listen on and to tell peers; `port`: 0 for any free one."""

    run_dir: Path
    host: str
    port: int


class Exporter(Protocol):
    """Lets peers reach a pool."""

    @property
    def endpoint(self) -> str:
        """A URL that peers connect to. Holds no secret."""
        ...

    async def start(self) -> None:
        """From now on it answers."""
        ...

    async def close(self) -> None:
        """Idempotent. When it returns, no thread reads the pool any more."""
        ...


class Link(Protocol):
    """A way from one peer's pool into one's own. Calls block: they run on a thread of their own."""

    info: PoolInfo

    @property
    def is_open(self) -> bool:
        """False: of no use any more, connect again."""
        ...

    def pull(self, copies: Sequence[Copy], deadline_s: float) -> None:
        """Copies whole blocks until `deadline_s` (of time.monotonic). Raises TransferError.

        Nobody writes to the blocks any more when it returns or raises; after an error they hold unknown bytes.
        """
        ...

    def abort(self) -> None:
        """From any thread: a pull that runs ends soon, with TransferError if it was not through. Idempotent."""
        ...

    def close(self) -> None:
        """Idempotent; not while a pull runs."""
        ...


@dataclass(frozen=True, slots=True)
class Transport:
    """One way to move blocks. `unreachable` says, without trying, why an endpoint cannot be reached ("": it may)."""

    name: str  # the scheme of its endpoints
    export: Callable[
        [KvPool, PoolInfo, bytes, Place], Exporter
    ]  # with the key that pullers must know; raises OSError
    connect: Callable[[str, bytes, KvPool, float], Link]  # endpoint, key, own pool, timeout in seconds
    unreachable: Callable[[str], str]
