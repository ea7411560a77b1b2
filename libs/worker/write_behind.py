"""Blocks on their way to the store, behind the requests that made them.

    commit --> runs of a chain --> (full, or idle) --> offer --> what the store lacks --> object
               8 blocks at most                        to the coordinator                 one thread

Nothing waits for this: a queue that is full drops what is new, a block that is evicted before its turn is lost, a
store that fails is left alone for a while. Each is counted. Blocks are held only while they are being written.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from libs.engine.kv.layout import KvLayout
from libs.engine.sequence import Sequence
from libs.service.logs import get_logger
from libs.store.interface import StoredObject, StoreError, StoreFull
from libs.store.objects import BlockRecord, write_object
from libs.wire import subjects
from libs.wire.errors import BatonError
from libs.wire.store_messages import StoreAdded, StoreChanged, StoreOffer, StoreWanted
from libs.worker.store_access import StoreAccess

OBJECT_BLOCKS: Final = 8
OBJECT_BYTES: Final = 8 << 20  # larger blocks make smaller groups
MAX_WAITING_BLOCKS: Final = 65_536
IDLE_S: Final = 1.0  # a run that does not grow for so long is written as it is
TICK_S: Final = 0.25
RUNS_PER_OFFER: Final = 32
OFFER_TIMEOUT_S: Final = 1.0
FULL_PAUSE_S: Final = 30.0
FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 30.0
log = get_logger()


@dataclass(slots=True)
class Run:
    """Consecutive blocks of one chain. `parent` names the block before the first."""

    tenant: str
    parent: bytes
    blocks: list[BlockRecord] = field(default_factory=list)
    grown_s: float = 0.0

    @property
    def tail(self) -> bytes:
        return self.blocks[-1].name if self.blocks else self.parent

    def part(self, first: int, end: int) -> Run:
        parent = self.blocks[first - 1].name if first else self.parent
        return Run(self.tenant, parent, self.blocks[first:end])

    def parts(self, is_in: list[bool]) -> Iterator[Run]:
        """The longest pieces whose blocks are all in."""
        first = 0
        for index, keep in enumerate([*is_in, False]):
            if not keep:
                if index > first:
                    yield self.part(first, index)
                first = index + 1


@dataclass(slots=True)
class WriteCounts:
    """In blocks, since the process began."""

    written: int = 0
    lost: int = 0  # evicted before they were written
    dropped: int = 0  # the queue was full, or the store failed


class WriteBehind:
    """One worker's way into the store. Owned by the event loop's thread."""

    def __init__(
        self,
        access: StoreAccess,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = WriteCounts()
        self.problem = ""  # why nothing is written at present
        self._access = access
        self._clock = clock
        self._limit = object_blocks(access.pool.layout)
        self._growing: OrderedDict[bytes, Run] = OrderedDict()  # by tail, longest idle first
        self._ready: deque[Run] = deque()
        self._loaded: set[bytes] = set()  # names about to be given to blocks that the store has
        self._num_waiting = 0
        self._work = asyncio.Event()
        self._pause_s = 0.0
        self._paused_until_s = 0.0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-write")
        access.kv.on_named(self._named)

    @property
    def num_waiting(self) -> int:
        """Blocks that are not written yet."""
        return self._num_waiting

    def loaded(self, names: list[bytes]) -> None:
        """Blocks that came from the store are about to get these names: they need not be offered to it."""
        self._loaded = set(names)

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._work.wait()
            self._work.clear()
            self._close_runs(self._clock() - IDLE_S)
            while self._ready:
                await self._write_some()

    async def flush(self, timeout_s: float) -> bool:
        """Writes what waits, while `run` runs; False if that takes longer."""
        self._close_runs(float("inf"))
        self._work.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._num_waiting:  # noqa: ASYNC110 -- two queues, and what the thread has
                    await asyncio.sleep(TICK_S / 10)
        return not self._num_waiting

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ in

    def _named(self, seq: Sequence, indices: list[int]) -> None:
        size = self._access.kv.block_size
        for index in indices:
            name = seq.names[index]
            if name in self._loaded:
                continue
            if self._num_waiting >= MAX_WAITING_BLOCKS:
                self.counts.dropped += 1
                continue
            parent = seq.names[index - 1] if index else seq.root
            record = BlockRecord(name, tuple(seq.tokens[index * size : (index + 1) * size]))
            self._append(seq.tenant, parent, record)
        self._loaded = set()

    def _append(self, tenant: str, parent: bytes, record: BlockRecord) -> None:
        run = self._growing.pop(parent, None) or Run(tenant, parent)
        if record.name in self._growing:  # evicted, and computed again before the first was written
            self._ready.append(self._growing.pop(record.name))
        run.blocks.append(record)
        run.grown_s = self._clock()
        self._num_waiting += 1
        if len(run.blocks) >= self._limit:
            self._ready.append(run)
            self._work.set()
        else:
            self._growing[run.tail] = run

    def _close_runs(self, idle_since_s: float) -> None:
        while self._growing and next(iter(self._growing.values())).grown_s <= idle_since_s:
            self._ready.append(self._growing.popitem(last=False)[1])

    # ------------------------------------------------------------ out

    async def _write_some(self) -> None:
        runs = [self._ready.popleft() for _ in range(min(RUNS_PER_OFFER, len(self._ready)))]
        left = sum(len(run.blocks) for run in runs)
        try:
            if self._clock() < self._paused_until_s:
                self.counts.dropped += left
                return
            for run in await self._wanted(runs):
                await self._write(run)
        finally:
            self._num_waiting -= left

    async def _wanted(self, runs: list[Run]) -> list[Run]:
        """Of the runs, what the store lacks; everything where no coordinator says."""
        names = tuple(block.name for run in runs for block in run.blocks)
        offer = StoreOffer(worker_id=self._access.worker_id, names=names)
        try:
            answer = await self._access.bus.request(
                subjects.STORE_OFFER, offer, StoreWanted, timeout_s=OFFER_TIMEOUT_S
            )
        except BatonError:
            return runs
        if len(answer.wanted) != len(names):
            return runs
        wanted = iter(answer.wanted)
        return [part for run in runs for part in run.parts([next(wanted) for _ in run.blocks])]

    async def _write(self, run: Run) -> None:
        """What of the run is still in the pool, as one object or several."""
        found = [self._access.kv.find(block.name) for block in run.blocks]
        self.counts.lost += found.count(None)
        for part in run.parts([block is not None for block in found]):
            if self._clock() < self._paused_until_s:
                self.counts.dropped += len(part.blocks)
                continue
            blocks = [self._access.kv.find(block.name) for block in part.blocks]
            held = [block for block in blocks if block is not None]
            if len(held) < len(blocks):  # evicted while the part before was being written
                self.counts.lost += len(blocks)
                continue
            await self._put(part, held)

    async def _put(self, run: Run, blocks: list[int]) -> None:
        self._access.kv.ref(blocks)
        views = [self._access.pool.blocks(block, 1) for block in blocks]
        work = asyncio.get_running_loop().run_in_executor(
            self._thread,
            lambda: write_object(
                self._access.store, self._access.objects, run.tenant, run.parent, run.blocks, views
            ),
        )
        # A caller that is cancelled leaves; the blocks are held until the thread is done with them.
        work.add_done_callback(lambda done: self._access.kv.unref(blocks))
        try:
            self._written(run, await asyncio.shield(work))
        except StoreFull as error:
            self._failed(run, error, FULL_PAUSE_S)
        except StoreError as error:
            self._failed(run, error, min(MAX_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s)))

    def _written(self, run: Run, stored: StoredObject) -> None:
        if self.problem:
            log.info("store.recovered")
        self.problem, self._pause_s = "", 0.0
        self.counts.written += len(run.blocks)
        added = StoreAdded(key=stored.key, num_bytes=stored.num_bytes)
        self._access.outbox.put(
            subjects.STORE_CHANGED, StoreChanged(sender=self._access.worker_id, added=(added,))
        )

    def _failed(self, run: Run, error: StoreError, pause_s: float) -> None:
        """Serving goes on. These blocks may be offered again when somebody computes them again."""
        if not self.problem:
            log.warning("store.failed", error=error.message, pause_s=pause_s)
        self.problem, self._pause_s = error.message, pause_s
        self._paused_until_s = self._clock() + pause_s
        self.counts.dropped += len(run.blocks)


def object_blocks(layout: KvLayout) -> int:
    """Blocks of one object."""
    return min(OBJECT_BLOCKS, max(1, OBJECT_BYTES // layout.block_bytes))
