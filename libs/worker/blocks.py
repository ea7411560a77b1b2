"""The cluster's view of this worker's blocks: numbered events, the full listing on request, pins for peers."""

from __future__ import annotations

import time

from libs.engine.kv.cache import KvCache
from libs.engine.kv.leases import LeaseTable
from libs.service.bus import Incoming
from libs.wire.errors import Code, RequestRefused
from libs.wire.messages import (
    BlockEvents,
    Dump,
    DumpRequest,
    Pin,
    Pinned,
    PoolRef,
    Release,
    Released,
)

EVENTS_PER_MESSAGE = 8192  # 33 bytes each: far below NATS's max_payload
NAMES_PER_PAGE = 8192
MAX_LEASE_S = 120.0


class BlockFeed:
    """Numbers the pool's events for the coordinators and answers their requests for everything."""

    def __init__(self, kv: KvCache, worker_id: str, epoch: int) -> None:
        self._kv = kv
        self._worker_id = worker_id
        self._epoch = epoch
        self._listing: tuple[bytes, ...] = ()
        self._listing_seq = -1

    def take(self) -> list[BlockEvents]:
        """What happened since the last call, in messages of bounded size."""
        events = self._kv.take_events()
        first_seq = self._kv.num_events - len(events)  # older ones that overflowed are a gap: readers resync
        return [
            BlockEvents(
                worker_id=self._worker_id,
                epoch=self._epoch,
                first_seq=first_seq + start,
                events=tuple(events[start : start + EVENTS_PER_MESSAGE]),
            )
            for start in range(0, len(events), EVENTS_PER_MESSAGE)
        ]

    def dump(self, request: DumpRequest) -> Dump:
        """One page of the names held after event `seq`. All pages of one listing carry the same `seq`.

        Events not yet taken are in the listing already; replaying them later changes nothing.
        """
        if request.offset == 0:
            self._listing = tuple(self._kv.names())
            self._listing_seq = self._kv.num_events - 1
        page = self._listing[request.offset : request.offset + NAMES_PER_PAGE]
        end = request.offset + len(page)
        more = bool(page) and end < len(self._listing)
        return Dump(
            worker_id=self._worker_id,
            epoch=self._epoch,
            seq=self._listing_seq,
            names=page,
            next_offset=end if more else None,
        )


class Pins:
    """Serves peers that pull named blocks: pin, then (they copy), then release."""

    def __init__(self, kv: KvCache, leases: LeaseTable, pool: PoolRef) -> None:
        self._kv = kv
        self._leases = leases
        self._pool = pool

    async def pin(self, request: Pin, incoming: Incoming) -> Pinned:
        """Leases the longest known run of `request.names`. Raises RequestRefused for another layout."""
        if request.layout != self._pool.layout:
            text = f"KV layout {request.layout} asked, {self._pool.layout} held"
            raise RequestRefused(Code.MODEL_MISMATCH, text, retryable=False)
        blocks = self._kv.lookup(request.names)
        if not blocks:
            return Pinned(pool=self._pool, lease_id="", block_ids=())
        lease_id = self._leases.open(time.monotonic(), min(max(request.lease_s, 0.0), MAX_LEASE_S))
        self._leases.add(lease_id, blocks)
        return Pinned(pool=self._pool, lease_id=lease_id, block_ids=tuple(blocks))

    async def release(self, request: Release, incoming: Incoming) -> Released:
        return Released(live=self._leases.release(request.lease_id))
