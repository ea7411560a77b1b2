"""The coordinator's side of the durable store: which blocks are in it, what is written next, what is deleted.

    listing    at the start and each `store_rescan_s`: the whole truth, as others left it
    news       StoreChanged from workers and other coordinators, in between
    eviction   after each change: victims of the index are deleted, and everybody is told

Workers read and write the bytes. Nothing here has to survive: the listing tells it all again. Copies of the coordinator
decide for themselves and hear each other; deleting twice does no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from libs.service.bus import Bus, Incoming
from libs.service.logs import get_logger
from libs.store.index import StoreIndex
from libs.store.interface import Store, StoredObject, StoreError
from libs.store.key import ObjectKey, block_key, is_key
from libs.wire import subjects
from libs.wire.store_messages import (
    StoreChanged,
    StoreLocate,
    StoreLocated,
    StoreOffer,
    StoreRemoved,
    StoreRun,
    StoreWanted,
)
from services.cache.misses import Misses

TICK_S: Final = 0.2
REST: Final = 20  # a listing that takes long is not begun again before so many times as long
OFFER_S: Final = 30.0  # what a worker was told to write is asked of nobody else for so long
MAX_OFFERED: Final = 1 << 20
MAX_USED: Final = 65_536  # objects to be touched at once; more are not
DELETES_PER_ROUND: Final = 256
REMOVED_PER_MESSAGE: Final = 1024  # about 200 bytes each: far below NATS's max_payload
SCAN_TIMEOUT_S: Final = 600.0
EVICTED: Final = "evicted"  # by a coordinator, which deletes the object itself
log = get_logger()


class StoreKeeper:
    """`tell` publishes to all coordinators. Owned by the event loop's thread; `wall_s` is seconds since 1970."""

    def __init__(
        self,
        instance_id: str,
        store: Store,
        index: StoreIndex,
        misses: Misses,
        tell: Callable[[StoreChanged], None],
        *,
        rescan_s: float,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.index = index
        self.problem = "not listed yet"
        self.removed: Counter[str] = Counter()
        self.num_scans = 0
        self._instance_id = instance_id
        self._store = store
        self._misses = misses
        self._tell = tell
        self._rescan_s = rescan_s
        self._wall_s = wall_s
        self._offered: dict[bytes, float] = {}  # by block key: until when, oldest first
        self._to_delete: set[str] = set()  # damaged objects
        self._used: dict[str, None] = {}  # objects since the last time the store was told
        self._listed = asyncio.Event()

    async def run(self) -> None:
        """Lists, deletes, lists again, until cancelled."""
        next_scan_s = 0.0
        while True:
            began_s = time.monotonic()
            if began_s >= next_scan_s:
                await self._scan()
                ended_s = time.monotonic()
                next_scan_s = ended_s + max(self._rescan_s, REST * (ended_s - began_s))
            await self._delete()
            await self._touch()
            await asyncio.sleep(TICK_S)

    async def settle(self, timeout_s: float) -> None:
        """Waits for the first listing, or until the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._listed.wait()

    async def listen(self, bus: Bus, queue: str) -> None:
        """News for every coordinator, questions for one of `queue`."""

        async def offer(message: StoreOffer, incoming: Incoming) -> StoreWanted:
            return self.offer(message)

        async def locate(message: StoreLocate, incoming: Incoming) -> StoreLocated:
            return self.locate(message)

        async def changed(message: StoreChanged, incoming: Incoming) -> None:
            if message.sender != self._instance_id:
                self.changed(message)

        await bus.subscribe(subjects.STORE_CHANGED, (StoreChanged,), changed)
        await bus.subscribe(subjects.STORE_OFFER, (StoreOffer,), offer, queue=queue)
        await bus.subscribe(subjects.STORE_LOCATE, (StoreLocate,), locate, queue=queue)

    # ------------------------------------------------------------ questions

    def run_of(self, names: Sequence[bytes]) -> int:
        """Leading blocks that the store holds."""
        return self.index.run(names)

    def use(self, names: Sequence[bytes]) -> int:
        """A request uses the leading blocks that are here: how many. The store is told soon, for later coordinators."""
        count = self.index.use(names, self._wall_s())
        if count and len(self._used) < MAX_USED:
            self._used.update(dict.fromkeys(each.path for each in self.index.locate(names[:count])))
        return count

    def locate(self, request: StoreLocate) -> StoreLocated:
        found = self.index.locate(request.names)
        runs = tuple(StoreRun(key=each.path, first=each.first, count=each.count) for each in found)
        return StoreLocated(runs=runs)

    def offer(self, request: StoreOffer) -> StoreWanted:
        now_s = time.monotonic()
        self._forget_offers(now_s)
        wanted = []
        for name in request.names:
            key = block_key(name)
            is_wanted = not self.index.run((name,)) and key not in self._offered
            if is_wanted:
                self._offered[key] = now_s + OFFER_S
            wanted.append(is_wanted)
        return StoreWanted(wanted=tuple(wanted))

    def changed(self, news: StoreChanged) -> None:
        now_s = self._wall_s()
        for added in news.added:
            if self._add(added.key, added.num_bytes, now_s):
                for key in ObjectKey.parse(added.key).blocks:
                    self._offered.pop(key, None)
        for removed in news.removed:
            self._forget(removed.key, removed.reason)
            if removed.reason not in (EVICTED, "gone") and is_key(removed.key):
                self._to_delete.add(removed.key)
        if news.used:
            self.index.use(news.used, now_s)  # the sender's coordinator touches them

    def detail(self) -> dict[str, str | int | float]:
        """For `baton status` and `baton cache stats`."""
        return {
            "store": self.problem or "ok",
            "store_url": self._store.url,
            "store_objects": self.index.num_objects,
            "store_blocks": self.index.num_blocks,
            "store_mib": round(self.index.num_bytes / 2**20, 1),
            "store_capacity_mib": round(self.index.capacity_bytes / 2**20),
            "store_scans": self.num_scans,
            "store_unreadable": self._store.num_unreadable,
            **{f"store_removed_{reason}": count for reason, count in self.removed.items()},
        }

    # ------------------------------------------------------------ work

    async def _scan(self) -> None:
        """Replaces what is known by what is there. Objects that are added meanwhile stay."""
        pages: asyncio.Queue[list[StoredObject] | None] = asyncio.Queue(4)
        loop = asyncio.get_running_loop()

        def read() -> None:
            for page in self._store.list():
                asyncio.run_coroutine_threadsafe(pages.put(page), loop).result(SCAN_TIMEOUT_S)

        self.index.begin_scan()
        reading = asyncio.ensure_future(asyncio.to_thread(read))
        reading.add_done_callback(lambda done: asyncio.ensure_future(pages.put(None)))
        while (page := await pages.get()) is not None:
            for each in page:
                self.index.seen(each.key, each.num_bytes, each.used_s)
        try:
            await reading
        except StoreError as error:
            if self.problem != error.message:
                log.warning("store cannot be listed", error=error.message)
            self.problem = error.message
            self.index.abandon_scan()
        else:
            self.problem = ""
            self.index.end_scan()
            self.num_scans += 1
            await asyncio.to_thread(self._store.remove_leftovers)
        self._listed.set()

    async def _delete(self) -> None:
        victims = self.index.victims(self._wall_s())
        doomed = [*victims, *self._to_delete]
        self._to_delete.clear()
        for start in range(0, len(doomed), DELETES_PER_ROUND):
            failed = await asyncio.to_thread(self._delete_all, doomed[start : start + DELETES_PER_ROUND])
            if failed:
                log.warning("store cannot delete", objects=len(failed), error=failed[0].message)
        for path in victims:
            self._forget(path, EVICTED)
        removed = tuple(StoreRemoved(key=path, reason=EVICTED) for path in victims)
        for start in range(0, len(removed), REMOVED_PER_MESSAGE):
            part = removed[start : start + REMOVED_PER_MESSAGE]
            self._tell(StoreChanged(sender=self._instance_id, removed=part))

    async def _touch(self) -> None:
        """Heads of chains last: what is touched later is deleted later."""
        used, self._used = list(self._used), {}
        if used:
            await asyncio.to_thread(self._store.touch, reversed(used))

    def _delete_all(self, paths: list[str]) -> list[StoreError]:
        failed = []
        for path in paths:
            try:
                self._store.delete(path)
            except StoreError as error:  # the next listing shows it again
                failed.append(error)
        return failed

    def _add(self, path: str, num_bytes: int, now_s: float) -> bool:
        try:
            return self.index.add(path, num_bytes, now_s)
        except ValueError:
            log.warning("no object of a store", key=path[:200])
            return False

    def _forget(self, path: str, reason: str) -> None:
        if self.index.remove(path):
            self.removed[reason] += 1
            self._misses.note(ObjectKey.parse(path).blocks, reason)

    def _forget_offers(self, now_s: float) -> None:
        while self._offered:
            key, until_s = next(iter(self._offered.items()))
            if until_s > now_s and len(self._offered) <= MAX_OFFERED:
                return
            del self._offered[key]
