"""Fetching dumps: after a worker appears, restarts, or a gap shows in its events."""

from __future__ import annotations

import asyncio
from typing import Protocol

from libs.placement.index import BlockIndex
from libs.service.bus import Bus
from libs.service.logs import get_logger
from libs.wire import subjects
from libs.wire.errors import BatonError, DecodeError
from libs.wire.messages import BlockEvents, Dump, DumpRequest
from services.cache.feed import Feed

DUMP_TIMEOUT_S = 2.0  # one page
MAX_DUMPS_AT_ONCE = 8
MOVING_RETRIES = 2  # a listing that changes under the reader is read again so often, then taken as it is
MIN_PAUSE_S = 0.1  # between two dumps of one worker; doubles while they do not help
MAX_PAUSE_S = 5.0

log = get_logger()


class Pages(Protocol):
    """How a page of a worker's dump is had. Raises BatonError when it is not."""

    async def __call__(self, worker_id: str, offset: int) -> Dump: ...


class Synchroniser:
    """Owns the feeds of all live workers, and at most one dump in progress for each of them."""

    def __init__(self, index: BlockIndex, fetch: Pages) -> None:
        self._index = index
        self._fetch = fetch
        self._feeds: dict[str, Feed] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closed = False
        self._slots = asyncio.Semaphore(MAX_DUMPS_AT_ONCE)

    @property
    def num_in_sync(self) -> int:
        return sum(feed.in_sync for feed in self._feeds.values())

    @property
    def num_gaps(self) -> int:
        return sum(feed.num_gaps for feed in self._feeds.values())

    @property
    def num_dumps(self) -> int:
        return sum(feed.num_dumps for feed in self._feeds.values())

    def join(self, worker_id: str, epoch: int) -> None:
        """A worker is there, or there in a new life."""
        feed = self._feeds.get(worker_id)
        if feed is None:
            self._feeds[worker_id] = Feed(worker_id, epoch, self._index)
        elif epoch > feed.epoch:
            feed.restart(epoch)
        self._ensure(worker_id)

    def leave(self, worker_id: str) -> None:
        """A worker is gone. Its names go with it. Idempotent."""
        feed = self._feeds.pop(worker_id, None)
        if feed is not None:
            feed.close()
        task = self._tasks.pop(worker_id, None)
        if task is not None:
            task.cancel()

    def receive(self, message: BlockEvents) -> None:
        """Events of a worker that has not joined are left to the dump that its joining brings."""
        feed = self._feeds.get(message.worker_id)
        if feed is not None:
            feed.receive(message)
            self._ensure(message.worker_id)

    def doubt_all(self) -> None:
        """Events of unknown number were lost: reads every worker's listing again; until then the old ones serve."""
        for worker_id, feed in self._feeds.items():
            feed.doubt()
            self._ensure(worker_id)

    async def settle(self, timeout_s: float) -> None:
        """Waits until the dumps now under way are in, or the time is up."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=timeout_s)

    async def close(self) -> None:
        """Ends all dumps and starts no more. What the index knows stays."""
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ensure(self, worker_id: str) -> None:
        """Starts fetching a dump where one is needed and none is on its way."""
        if worker_id not in self._tasks and not self._feeds[worker_id].in_sync and not self._closed:
            task = asyncio.create_task(self._recover(self._feeds[worker_id]), name=f"dump of {worker_id}")
            self._tasks[worker_id] = task
            task.add_done_callback(lambda done: self._ended(worker_id, done))

    def _ended(self, worker_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(worker_id) is task:
            del self._tasks[worker_id]
            if not task.cancelled() and task.exception() is not None:
                log.error("dump.bug", worker_id=worker_id, exc_info=task.exception())
            elif worker_id in self._feeds:
                self._ensure(worker_id)  # a gap may have shown while the last pause ran

    async def _recover(self, feed: Feed) -> None:
        """Reads dumps until the feed is in sync; pauses after each, so that lossy events cannot make a storm."""
        pause_s = MIN_PAUSE_S
        while not feed.in_sync and not feed.closed:
            try:
                async with self._slots:
                    await self._dump(feed)
            except BatonError as error:
                feed.abandon_dump()
                log.warning("dump.failed", worker_id=feed.worker_id, code=error.code, error=error.message)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _dump(self, feed: Feed) -> None:
        for attempt in range(MOVING_RETRIES + 1):
            if await self._read_pages(feed, accept_moved=attempt == MOVING_RETRIES):
                feed.finish_dump()
                log.debug("dump.read", worker_id=feed.worker_id, names=self._index.count(feed.worker_id))
                return

    async def _read_pages(self, feed: Feed, *, accept_moved: bool) -> bool:
        """Reads one whole dump into the feed's draft. False: it has to be read again."""
        offset: int | None = 0
        while offset is not None:
            page = await self._fetch(feed.worker_id, offset)
            if not feed.add_page(page, first=offset == 0):
                return False
            if feed.listing_moved(page) and not accept_moved:
                return False
            offset = _following(page, offset)
        return True


def _following(page: Dump, offset: int) -> int | None:
    """Where the next page begins. A worker that does not advance would keep us reading for ever."""
    if page.next_offset is not None and page.next_offset <= offset:
        raise DecodeError(f"dump of {page.worker_id}: next_offset {page.next_offset} after offset {offset}")
    return page.next_offset


def nats_pages(bus: Bus) -> Pages:
    """Pages asked for over the bus."""

    async def fetch(worker_id: str, offset: int) -> Dump:
        subject = subjects.dump(worker_id)
        return await bus.request(subject, DumpRequest(offset=offset), Dump, timeout_s=DUMP_TIMEOUT_S)

    return fetch
