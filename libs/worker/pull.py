"""Pulling a prompt's known prefix from a peer: pin, copy, confirm."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from opentelemetry.context import Context

from libs.engine.kv.cache import KvCache
from libs.engine.kv.names import block_names
from libs.engine.sequence import Sequence
from libs.service.bus import Bus
from libs.service.outbox import Outbox
from libs.transfer.interface import TransferError
from libs.transfer.links import Links
from libs.wire import subjects
from libs.wire.errors import BatonError
from libs.wire.messages import Pin, Pinned, PoolRef, Release, Released, Source


async def confirm(bus: Bus, pool: PoolRef, lease_id: str, timeout_s: float, context: Context) -> None:
    """Releases a lease and makes sure that it had held until now. Raises TransferError if it had not.

    Only then are the bytes copied under it known to be whole: the holder may have been stopped, the lease may
    have run out and the blocks may have been filled with something else while we copied.
    """
    subject = subjects.release(pool.worker_id)
    try:
        answer = await bus.request(
            subject, Release(lease_id=lease_id), Released, timeout_s=timeout_s, context=context
        )
    except BatonError as error:
        raise TransferError(f"{pool.worker_id} did not confirm the lease: {error.message}") from error
    if not answer.live:
        raise TransferError(f"the lease at {pool.worker_id} had run out")


class PrefixPuller:
    """Fills the head of a sequence from the pool of a peer that holds more of it than the own pool does."""

    def __init__(
        self,
        kv: KvCache,
        bus: Bus,
        outbox: Outbox,
        links: Links,
        layout: str,
        *,
        timeout_s: float,
        lease_s: float,
    ) -> None:
        self._kv = kv
        self._bus = bus
        self._outbox = outbox
        self._links = links
        self._layout = layout
        self._timeout_s = timeout_s
        self._lease_s = lease_s

    async def pull(self, seq: Sequence, sources: Seq[Source], context: Context) -> int:
        """Pulls from the best source; returns the tokens pulled. Raises TransferError.

        Before: `seq` is held, its own hits admitted. After: `seq.num_computed` covers what was pulled and its
        blocks are named; after an error it holds nothing, and starts from its own hits again.
        """
        best = max(sources, key=lambda source: source.num_blocks, default=None)
        if best is None or best.num_blocks <= len(seq.blocks):
            return 0
        names = self._missing(seq)[: best.num_blocks - len(seq.blocks)]
        if not names:
            return 0
        try:
            pinned = await self._pin(best.worker_id, names, context)
        except TransferError:
            self._kv.release(seq)
            raise
        if not pinned.block_ids:
            return 0
        return await self._copy(seq, pinned, context)

    def _missing(self, seq: Sequence) -> tuple[bytes, ...]:
        size = self._kv.block_size
        usable = seq.num_tokens // size * size
        return block_names(seq.root, seq.tokens[:usable], size)[len(seq.blocks) :]

    async def _pin(self, worker_id: str, names: tuple[bytes, ...], context: Context) -> Pinned:
        request = Pin(names=names, layout=self._layout, lease_s=self._lease_s)
        try:
            return await self._bus.request(
                subjects.pin(worker_id), request, Pinned, timeout_s=self._timeout_s, context=context
            )
        except BatonError as error:
            raise TransferError(f"{worker_id} did not pin: {error.message}") from error

    async def _copy(self, seq: Sequence, pinned: Pinned, context: Context) -> int:
        before = len(seq.blocks)
        pulled = len(pinned.block_ids) * self._kv.block_size
        confirmed = False
        try:
            if not self._kv.grow(seq, before * self._kv.block_size + pulled):
                raise TransferError("no free blocks to pull into")
            copies = list(zip(pinned.block_ids, seq.blocks[before:], strict=True))
            await self._links.pull(pinned.pool, copies, self._timeout_s)
            await confirm(self._bus, pinned.pool, pinned.lease_id, self._timeout_s, context)
            confirmed = True
        finally:
            if not confirmed:
                self._kv.release(seq)
                self._outbox.put(subjects.release(pinned.pool.worker_id), Release(lease_id=pinned.lease_id))
        gained = min(
            pulled, seq.num_tokens - 1 - seq.num_computed
        )  # the last token is computed: for its logits
        seq.num_computed += gained
        seq.num_cached += gained
        seq.num_from_peer += gained
        self._kv.commit(seq)
        return gained
