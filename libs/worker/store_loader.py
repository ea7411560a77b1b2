"""Blocks out of the store, straight into the pool, as long as that is quicker than computing them.

    objects      | 0 | 1 | 2 | 3 | 4 | ...      several are read at once; they count in order
    blocks        in the sequence  |  being read: held until the thread is done, whoever has left meanwhile

A prefix is of use only up to its first hole. So the first object that is damaged, gone or late ends the load; what
came before it stays, and the engine computes the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from opentelemetry.context import Context

from libs.engine.kv.names import block_names
from libs.engine.sequence import Sequence
from libs.service.logs import get_logger
from libs.store.interface import ObjectDamaged, ObjectGone, StoreError
from libs.store.objects import BlockRecord, read_blocks
from libs.wire import subjects
from libs.wire.errors import BatonError
from libs.wire.store_messages import (
    StoreChanged,
    StoreLocate,
    StoreLocated,
    StoreRemoved,
    StoreRun,
)
from libs.worker.store_access import StoreAccess

READERS: Final = 4
NAMES_PER_LOCATE: Final = 8192
LOCATE_TIMEOUT_S: Final = 1.0
MAX_WAIT_S: Final = 10.0  # for one object, where nobody knows how fast this worker computes
log = get_logger()


@dataclass(frozen=True, slots=True)
class Read:
    """An object on its way into blocks of the pool."""

    run: StoreRun
    num_tokens: int
    work: Future[None]


class StoreLoader:
    """One worker's way out of the store. Owned by the event loop's thread; `compute_rate` in tokens/s, 0: unknown."""

    def __init__(
        self,
        access: StoreAccess,
        *,
        compute_rate: Callable[[], float],
        on_loaded: Callable[[list[bytes]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_loaded = 0  # blocks
        self.failures: Counter[str] = Counter()  # loads that ended early, by why
        self._compute_rate = compute_rate
        self._on_loaded = on_loaded
        self._access = access
        self._clock = clock
        self._threads = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="store-read")

    async def load(self, seq: Sequence, num_blocks: int, context: Context) -> int:
        """Extends `seq` by what the store has of its first `num_blocks` blocks; returns the tokens that came.

        Before and after: `seq` is held, its blocks below `num_computed` are named. Never raises for the store's sake:
        `seq.miss` says why less came. Cancelled, it lets go of `seq` as it was.
        """
        size = self._access.kv.block_size
        have = len(seq.blocks)
        usable = min(num_blocks, seq.num_tokens // size)
        prefix = block_names(seq.root, seq.tokens[: usable * size], size)
        names = prefix[have:]
        if not names:
            return 0
        runs = await self._locate(names, context)
        wanted = sum(run.count for run in runs)
        if not 0 < wanted <= len(names):  # nothing, or an answer to another question
            seq.miss = "store: not located"
            return 0
        if not self._access.kv.grow(seq, (have + wanted) * size):
            seq.miss = "no free blocks"
            return 0
        loaded = await self._fill(seq, runs, names[:wanted])
        return self._loaded(seq, prefix[: have + loaded], loaded) if loaded else 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _locate(self, names: tuple[bytes, ...], context: Context) -> tuple[StoreRun, ...]:
        runs: list[StoreRun] = []
        for start in range(0, len(names), NAMES_PER_LOCATE):
            page = names[start : start + NAMES_PER_LOCATE]
            try:
                located = await self._access.bus.request(
                    subjects.STORE_LOCATE,
                    StoreLocate(names=page),
                    StoreLocated,
                    timeout_s=LOCATE_TIMEOUT_S,
                    context=context,
                )
            except BatonError as error:
                log.warning("store.locate failed", error=error.message)
                break
            runs += located.runs
            if sum(run.count for run in located.runs) < len(page):
                break
        return tuple(run for run in runs if run.count > 0 and run.first >= 0)

    async def _fill(self, seq: Sequence, runs: tuple[StoreRun, ...], names: tuple[bytes, ...]) -> int:
        """Reads into the last blocks of `seq`; returns how many came, and takes the others from it."""
        first = len(seq.blocks) - len(names)
        reads = self._start(seq, first, runs, names)
        loaded = 0
        try:
            began_s = self._clock()
            left = sum(read.num_tokens for read in reads)
            for read in reads:
                await self._wait(read, left)
                loaded += read.run.count
                left -= read.num_tokens
                if self._is_slow(loaded * self._access.kv.block_size, left, began_s):
                    raise StoreError("slower than computing")
        except StoreError as error:
            self._note(seq, reads, loaded, error)
        finally:
            self._let_go(seq, first + loaded, reads)
        return loaded

    def _start(
        self, seq: Sequence, first: int, runs: tuple[StoreRun, ...], names: tuple[bytes, ...]
    ) -> list[Read]:
        size = self._access.kv.block_size
        reads, at = [], 0
        for run in runs:
            records, targets = [], []
            for index in range(at, at + run.count):
                start = (first + index) * size
                records.append(BlockRecord(names[index], tuple(seq.tokens[start : start + size])))
                targets.append(self._access.pool.blocks(seq.blocks[first + index], 1))
            work = self._threads.submit(
                read_blocks, self._access.store, self._access.objects, run.key, run.first, records, targets
            )
            reads.append(Read(run, run.count * size, work))
            at += run.count
        return reads

    async def _wait(self, read: Read, left_tokens: int) -> None:
        """Raises StoreError when it failed, or when computing the rest would have been done by now."""
        rate = self._compute_rate()
        patience_s = left_tokens / rate if rate > 0 else MAX_WAIT_S
        await asyncio.wait({asyncio.wrap_future(read.work)}, timeout=min(MAX_WAIT_S, patience_s))
        if not read.work.done():
            raise StoreError("slower than computing")
        read.work.result()

    def _is_slow(self, loaded_tokens: int, left_tokens: int, began_s: float) -> bool:
        rate = self._compute_rate()
        if not left_tokens or rate <= 0:
            return False
        return (self._clock() - began_s) / loaded_tokens > 1 / rate

    def _note(self, seq: Sequence, reads: list[Read], loaded: int, error: StoreError) -> None:
        reason = _reason(error)
        seq.miss = f"store: {reason}"
        self.failures[reason] += 1
        log.warning("store.load ended early", engine_id=seq.request_id, blocks=loaded, error=error.message)
        if isinstance(error, (ObjectDamaged, ObjectGone)):
            key = _failed_key(reads, loaded)
            removed = StoreRemoved(key=key, reason=reason)
            self._access.outbox.put(
                subjects.STORE_CHANGED, StoreChanged(sender=self._access.worker_id, removed=(removed,))
            )

    def _let_go(self, seq: Sequence, keep: int, reads: list[Read]) -> None:
        """Blocks behind the first hole: free as soon as no thread writes to them."""
        tail = seq.blocks[keep:]
        if not tail:
            return
        del seq.blocks[keep:]
        running = [read.work for read in reads if not read.work.cancel() and not read.work.done()]
        if not running:
            self._access.kv.unref(tail)
            return
        waiter = asyncio.gather(*map(asyncio.wrap_future, running), return_exceptions=True)
        waiter.add_done_callback(lambda done: self._access.kv.unref(tail))

    def _loaded(self, seq: Sequence, names: tuple[bytes, ...], loaded: int) -> int:
        """`names`: of all blocks of the prompt so far, the last `loaded` of which came from the store."""
        # The last token is computed: for its logits.
        tokens = min(loaded * self._access.kv.block_size, seq.num_tokens - 1 - seq.num_computed)
        self.num_loaded += loaded
        self._on_loaded(list(names[-loaded:]))
        seq.num_computed += tokens
        seq.num_cached += tokens
        seq.num_from_store += tokens
        self._access.kv.commit(seq)
        self._access.outbox.put(
            subjects.STORE_CHANGED, StoreChanged(sender=self._access.worker_id, used=names)
        )
        return tokens


def _failed_key(reads: list[Read], loaded: int) -> str:
    """The object behind the `loaded` blocks that came."""
    for read in reads:
        if loaded < read.run.count:
            return read.run.key
        loaded -= read.run.count
    return ""


def _reason(error: StoreError) -> str:
    if isinstance(error, ObjectDamaged):
        return error.reason
    if isinstance(error, ObjectGone):
        return "gone"
    return "slow" if "slower than" in error.message else "failed"
