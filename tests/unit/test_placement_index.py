"""The index against a naive one, and feeds against the truth of a worker behind a lossy channel."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from libs.placement.index import BlockIndex
from libs.wire.messages import BlockEvent, BlockEvents, Dump
from services.cache import feed as feed_module
from services.cache.feed import Feed

NAMES = [bytes([number]) * 32 for number in range(12)]
WORKERS = ["w0", "w1", "w2", "w3"]
name_lists = st.lists(st.sampled_from(NAMES), max_size=12)


class IndexAgainstSets(RuleBasedStateMachine):
    """Whatever is done to the index is done to one set of names per worker."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex()
        self.truth: dict[str, set[bytes]] = {}

    @rule(worker=st.sampled_from(WORKERS), names=name_lists)
    def add(self, worker: str, names: list[bytes]) -> None:
        holder = self.index.holder_of(worker)
        if holder is not None:
            self.index.add(holder, names)
            self.truth[worker].update(names)

    @rule(worker=st.sampled_from(WORKERS), names=name_lists)
    def remove(self, worker: str, names: list[bytes]) -> None:
        holder = self.index.holder_of(worker)
        if holder is not None:
            self.index.remove(holder, names)
            self.truth[worker].difference_update(names)

    @rule(worker=st.sampled_from(WORKERS), names=name_lists, step=st.integers(0, 3))
    def replace(self, worker: str, names: list[bytes], step: int) -> None:
        holder = self.index.open()
        self.index.add(holder, names)
        self.index.sweep(step)
        self.agree()  # a draft is not seen
        self.index.publish(holder, worker)
        self.truth[worker] = set(names)

    @rule(names=name_lists)
    def abandon_draft(self, names: list[bytes]) -> None:
        holder = self.index.open()
        self.index.add(holder, names)
        self.index.retire(holder)

    @rule(worker=st.sampled_from(WORKERS))
    def drop(self, worker: str) -> None:
        self.index.drop(worker)
        self.truth.pop(worker, None)

    @rule(max_names=st.integers(1, 5))
    def sweep(self, max_names: int) -> None:
        self.index.sweep(max_names)

    @rule(names=name_lists)
    def look_up(self, names: list[bytes]) -> None:
        expected = {}
        for worker, held in self.truth.items():
            run = next((i for i, name in enumerate(names) if name not in held), len(names))
            if run:
                expected[worker] = run
        assert self.index.runs(names) == expected

    @invariant()
    def agree(self) -> None:
        for worker in WORKERS:
            held = self.truth.get(worker, set())
            assert self.index.count(worker) == len(held)
            for name in NAMES:
                assert (worker in self.index.runs([name])) == (name in held)

    def teardown(self) -> None:
        while self.index.sweep(3):
            pass
        assert len(self.index) == len(set().union(*self.truth.values()))


TestIndexAgainstSets = IndexAgainstSets.TestCase
TestIndexAgainstSets.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_holders_are_reused_so_that_masks_stay_small() -> None:
    index = BlockIndex()
    for number in range(200):  # a worker that restarts again and again
        holder = index.open()
        assert holder < 4
        index.add(holder, NAMES[number % 5 :])
        index.publish(holder, "w0")
        while index.sweep(4):
            pass


@dataclass
class FakeWorker:
    """Holds names, numbers its events, and remembers every message it ever sent."""

    epoch: int = 1
    next_seq: int = 0
    names: dict[bytes, None] = field(default_factory=dict)
    sent: list[BlockEvents] = field(default_factory=list)

    def change(self, names: list[bytes]) -> BlockEvents:
        """Stores what is not held, lets go what is."""
        events = []
        for name in names:
            stored = name not in self.names
            if stored:
                self.names[name] = None
            else:
                del self.names[name]
            events.append(BlockEvent(stored, name))
        message = BlockEvents(worker_id="w", epoch=self.epoch, first_seq=self.next_seq, events=tuple(events))
        self.next_seq += len(events)
        self.sent.append(message)
        return message

    def restart(self) -> None:
        self.epoch += 1
        self.next_seq = 0
        self.names.clear()

    def pages(self, page_size: int) -> list[Dump]:
        listing = tuple(self.names)
        starts = range(0, max(1, len(listing)), page_size)
        return [
            Dump(
                worker_id="w",
                epoch=self.epoch,
                seq=self.next_seq - 1,
                names=listing[start : start + page_size],
                next_offset=start + page_size if start + page_size < len(listing) else None,
            )
            for start in starts
        ]


def read_dump(feed: Feed, pages: list[Dump]) -> None:
    for number, page in enumerate(pages):
        if not feed.add_page(page, first=number == 0):
            return
    feed.finish_dump()


def held(index: BlockIndex) -> set[bytes]:
    return {name for name in NAMES if index.runs([name])}


steps = st.lists(
    st.tuples(
        st.sampled_from(["deliver", "lose", "twice", "replay", "swap", "restart", "dump", "stale dump"]),
        st.lists(st.sampled_from(NAMES), min_size=1, max_size=4),
    ),
    max_size=25,
)


@given(steps, st.integers(1, 5))
def test_one_dump_brings_the_index_to_the_workers_truth(
    script: list[tuple[str, list[bytes]]], page_size: int
) -> None:
    index, worker = BlockIndex(), FakeWorker()
    feed = Feed("w", worker.epoch, index)
    for action, names in script:
        if action == "deliver":
            feed.receive(worker.change(names))
        elif action == "lose":
            worker.change(names)
        elif action == "twice":
            message = worker.change(names)
            feed.receive(message)
            feed.receive(message)
        elif action == "replay" and worker.sent:
            feed.receive(worker.sent[len(names) % len(worker.sent)])
        elif action == "swap":
            early, late = worker.change(names), worker.change(names[::-1])
            feed.receive(late)
            feed.receive(early)
        elif action == "restart":
            worker.restart()
        elif action == "dump":
            read_dump(feed, worker.pages(page_size))
        elif action == "stale dump":  # events come while its pages are on their way
            pages = worker.pages(page_size)
            feed.receive(worker.change(names))
            read_dump(feed, pages)
    feed.receive(worker.change(NAMES[:1]))  # shows a loss, if the last message was lost
    if not feed.in_sync:
        read_dump(feed, worker.pages(page_size))
    assert feed.in_sync and feed.epoch == worker.epoch
    assert held(index) == set(worker.names)


def test_a_gap_keeps_serving_the_old_listing_until_the_dump() -> None:
    index, worker = BlockIndex(), FakeWorker()
    feed = Feed("w", 1, index)
    read_dump(feed, worker.pages(10))
    feed.receive(worker.change(NAMES[:3]))
    worker.change(NAMES[3:4])
    feed.receive(worker.change(NAMES[4:5]))
    assert not feed.in_sync and feed.num_gaps == 1
    assert held(index) == set(NAMES[:3])
    read_dump(feed, worker.pages(10))
    assert held(index) == set(NAMES[:5]) and feed.num_dumps == 2


def test_a_new_life_purges_at_once_and_the_old_one_is_not_heard_any_more() -> None:
    index, worker = BlockIndex(), FakeWorker()
    feed = Feed("w", 1, index)
    read_dump(feed, worker.pages(10))
    old = worker.change(NAMES[:3])
    feed.receive(old)
    worker.restart()
    feed.receive(worker.change(NAMES[5:6]))
    assert held(index) == set()
    feed.receive(old)
    read_dump(feed, worker.pages(10))
    feed.receive(old)
    assert held(index) == {NAMES[5]}


def test_events_kept_during_a_dump_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_KEPT_EVENTS", 10)
    index, worker = BlockIndex(), FakeWorker()
    feed = Feed("w", 1, index)
    pages = worker.pages(10)
    for _ in range(30):
        feed.receive(worker.change(NAMES[:1]))
        assert feed.num_kept <= 10
    read_dump(feed, pages)
    feed.receive(worker.change(NAMES[1:2]))
    assert not feed.in_sync  # what was let go shows as a gap
    read_dump(feed, worker.pages(10))
    assert held(index) == set(worker.names)


def test_a_closed_feed_takes_no_late_dump() -> None:
    index, worker = BlockIndex(), FakeWorker()
    worker.change(NAMES[:3])
    feed = Feed("w", 1, index)
    pages = worker.pages(2)
    assert feed.add_page(pages[0], first=True)
    feed.close()
    assert not feed.add_page(pages[1], first=False)
    feed.finish_dump()
    assert not feed.add_page(pages[0], first=True)
    assert held(index) == set() and index.holder_of("w") is None
