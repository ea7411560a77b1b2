"""One worker's numbered block events, made into its listing in the index. No I/O: `sync` fetches the dumps.

    events     ... 4 | 5 |   | 7 | 8 ...      6 is missing: the listing can no longer be trusted, 7 ... are kept
    dump       names held after event 7       replaces the listing; kept events above 7 follow, the others are void

Whatever arrives twice, late or from an earlier life of the worker changes nothing. Until the dump has come the old
listing stays: a stale name costs a pull that finds nothing, and the block is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import groupby

from libs.placement.index import BlockIndex
from libs.wire.messages import BlockEvent, BlockEvents, Dump

MAX_KEPT_EVENTS = (
    200_000  # while a dump is under way; beyond, they are let go and the next event shows the gap
)


class Feed:
    """Keeps the listing of `worker_id` in `index` equal to what one epoch of that worker told."""

    def __init__(self, worker_id: str, epoch: int, index: BlockIndex) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.closed = False
        self.num_gaps = 0
        self.num_dumps = 0
        self.num_kept = 0  # events that wait for a dump
        self._index = index
        self._next_seq: int | None = None  # None: a dump is needed
        self._kept: deque[BlockEvents] = deque()
        self._draft: int | None = None  # holder of the dump that is being read
        self._draft_seq = 0

    @property
    def in_sync(self) -> bool:
        return self._next_seq is not None

    def restart(self, epoch: int) -> None:
        """The worker began a new life: all it held is gone and its numbers start over."""
        self._clear()
        self.epoch = epoch

    def close(self) -> None:
        """Takes the worker's names out of the index for good: a dump that comes later is void. Idempotent."""
        self._clear()
        self.closed = True

    def doubt(self) -> None:
        """Asks for a dump although no gap has shown; one that is being read may miss what was lost."""
        self.abandon_dump()
        self._next_seq = None

    def receive(self, message: BlockEvents) -> None:
        """Takes events in; `in_sync` tells afterwards whether a dump is needed."""
        if message.epoch < self.epoch:
            return
        if message.epoch > self.epoch:
            self.restart(message.epoch)
        if self._next_seq is None:
            self._keep(message)
        elif message.first_seq > self._next_seq:
            self.num_gaps += 1
            self._next_seq = None
            self._keep(message)
        else:
            self._apply(message, self._next_seq)

    def add_page(self, page: Dump, *, first: bool) -> bool:
        """Takes in a page of a dump. False: the page is void, for it comes from another life of the worker.

        Events that the worker published while its pages were read are applied by `finish_dump`, from the first
        page's number on; a later page may show some of them already, which does no harm.
        """
        if self.closed:
            return False
        if page.epoch > self.epoch:
            self.restart(page.epoch)
        if page.epoch != self.epoch or (self._draft is None and not first):
            return False
        if first:
            self.abandon_dump()
            self._draft = self._index.open()
            self._draft_seq = page.seq
        assert self._draft is not None
        self._index.add(self._draft, page.names)
        return True

    def listing_moved(self, page: Dump) -> bool:
        """Whether names may have moved from an unread page to a read one, where nobody saw them."""
        return page.seq != self._draft_seq

    def finish_dump(self) -> None:
        """Makes the pages read the worker's listing, and applies the events that came since."""
        if self._draft is None:
            return
        self._index.publish(self._draft, self.worker_id)
        self._draft = None
        self._next_seq = self._draft_seq + 1
        self.num_dumps += 1
        kept = sorted(self._kept, key=lambda message: message.first_seq)
        self._forget_kept()
        for message in kept:
            self.receive(message)

    def abandon_dump(self) -> None:
        if self._draft is not None:
            self._index.retire(self._draft)
            self._draft = None

    def _clear(self) -> None:
        self.abandon_dump()
        self._index.drop(self.worker_id)
        self._next_seq = None
        self._forget_kept()

    def _apply(self, message: BlockEvents, next_seq: int) -> None:
        """Applies what is new of a message that starts at or below `next_seq`."""
        holder = self._index.holder_of(self.worker_id)
        assert holder is not None  # in sync means published
        events = message.events[next_seq - message.first_seq :]
        for stored, names in _runs_of(events):
            change = self._index.add if stored else self._index.remove
            change(holder, names)
        self._next_seq = next_seq + len(events)

    def _keep(self, message: BlockEvents) -> None:
        self.num_kept += len(message.events)
        if self.num_kept > MAX_KEPT_EVENTS:
            self._forget_kept()
            return
        self._kept.append(message)

    def _forget_kept(self) -> None:
        self._kept.clear()
        self.num_kept = 0


def _runs_of(events: tuple[BlockEvent, ...]) -> Iterator[tuple[bool, list[bytes]]]:
    """Consecutive events of the same kind together, in order."""
    for stored, run in groupby(events, key=lambda event: event.stored):
        yield stored, [event.name for event in run]
