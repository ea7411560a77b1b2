"""The coordinator's index of the store: from listings, from news, and from what it deletes itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from libs.store.eviction import make_policy
from libs.store.index import StoreIndex
from libs.store.interface import StoreError
from libs.wire.store_messages import StoreAdded, StoreChanged, StoreLocate, StoreOffer, StoreRemoved
from services.cache import store_keeper
from services.cache.misses import Misses
from services.cache.store_keeper import StoreKeeper
from tests.store_rig import LAYOUT, Chain, MemoryStore, make_chain

SECOND = 0.02  # between two listings


@dataclass
class Rig:
    store: MemoryStore
    keeper: StoreKeeper
    misses: Misses
    told: list[StoreChanged] = field(default_factory=list)

    async def until(self, condition: object) -> None:
        async with asyncio.timeout(5):
            while not condition():  # type: ignore[operator]  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def rescanned(self) -> None:
        before = self.keeper.num_scans
        await self.until(lambda: self.keeper.num_scans >= before + 2)


@asynccontextmanager
async def rig(store: MemoryStore, capacity_bytes: int = 1 << 30) -> AsyncIterator[Rig]:
    misses, told = Misses(), []
    index = StoreIndex(make_policy("lru"), capacity_bytes=capacity_bytes)
    keeper = StoreKeeper("cache-1", store, index, misses, told.append, rescan_s=SECOND)
    task = asyncio.create_task(keeper.run())
    try:
        await keeper.settle(5)
        yield Rig(store, keeper, misses, told)
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_keeper, "TICK_S", 0.01)


def names(chain: Chain) -> tuple[bytes, ...]:
    return tuple(record.name for record in chain.records)


async def test_a_listing_tells_all_and_the_next_one_what_others_did() -> None:
    store, chain, other = MemoryStore(), make_chain(1, 8), make_chain(2, 5)
    chain.write(store)
    async with rig(store) as it:
        assert it.keeper.run_of(names(chain)) == 8
        assert it.keeper.run_of(names(other)) == 0
        other.write(store)  # another Baton on the same store
        await it.until(lambda: it.keeper.run_of(names(other)) == 5)
        del store.objects[chain.key]
        await it.until(lambda: it.keeper.run_of(names(chain)) == 0)


async def test_a_store_that_cannot_be_listed_keeps_what_is_known_and_says_so() -> None:
    store, chain = MemoryStore(), make_chain(1, 8)
    chain.write(store)
    async with rig(store) as it:
        store.failure = StoreError("connection refused")
        await it.until(lambda: it.keeper.detail()["store"] == "connection refused")
        assert it.keeper.run_of(names(chain)) == 8
        store.failure = None
        await it.until(lambda: it.keeper.detail()["store"] == "ok")
        assert it.keeper.run_of(names(chain)) == 8


async def test_nothing_is_asked_for_twice() -> None:
    store, chain = MemoryStore(), make_chain(1, 8)
    async with rig(store) as it:
        offer = StoreOffer(worker_id="decode-1", names=names(chain))
        assert it.keeper.offer(offer).wanted == (True,) * 8
        assert it.keeper.offer(offer).wanted == (False,) * 8  # another worker is writing it
        stored = chain.write(store)
        added = StoreAdded(key=stored.key, num_bytes=stored.num_bytes)
        it.keeper.changed(StoreChanged(sender="decode-1", added=(added,)))
        assert it.keeper.offer(offer).wanted == (False,) * 8
        (run,) = it.keeper.locate(StoreLocate(names=names(chain)[3:])).runs
        assert (run.key, run.first, run.count) == (stored.key, 3, 5)


async def test_what_was_asked_for_and_never_came_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(MemoryStore()) as it:
        monkeypatch.setattr(store_keeper, "OFFER_S", 0.0)
        offer = StoreOffer(worker_id="decode-1", names=names(make_chain(1, 3)))
        assert it.keeper.offer(offer).wanted == (True,) * 3
        assert it.keeper.offer(offer).wanted == (True,) * 3


@pytest.mark.parametrize("reason", ["checksum", "gone"])
async def test_a_damaged_object_is_deleted_and_explains_the_miss(reason: str) -> None:
    store, chain = MemoryStore(), make_chain(1, 8)
    stored = chain.write(store)
    async with rig(store) as it:
        removed = StoreRemoved(key=stored.key, reason=reason)
        if reason == "gone":
            del store.objects[stored.key]
        it.keeper.changed(StoreChanged(sender="decode-1", removed=(removed,)))
        assert it.keeper.run_of(names(chain)) == 0
        assert it.misses.why(names(chain)[0]) == reason
        await it.until(lambda: stored.key not in store.objects)
        assert it.keeper.detail()[f"store_removed_{reason}"] == 1


async def test_eviction_deletes_tells_everybody_and_explains_the_miss() -> None:
    store = MemoryStore()
    chains = [make_chain(seed, 8) for seed in range(10)]
    one = chains[0].write(store).num_bytes
    assert one > 8 * LAYOUT.block_bytes
    async with rig(store, capacity_bytes=4 * one) as it:
        for chain in chains:
            stored = chain.write(store)
            added = StoreAdded(key=stored.key, num_bytes=stored.num_bytes)
            it.keeper.changed(StoreChanged(sender="decode-1", added=(added,)))
        await it.until(lambda: len(store.objects) <= 4)
        await it.until(lambda: sum(len(news.removed) for news in it.told) >= 6)
        told = {removed.key for news in it.told for removed in news.removed}
        assert told.isdisjoint(store.objects)
        gone = next(chain for chain in chains if chain.key in told)
        assert it.misses.why(names(gone)[0]) == "evicted"
        await it.rescanned()
        assert it.keeper.index.num_objects == len(store.objects)


async def test_a_second_copy_hears_of_it_and_deletes_nothing() -> None:
    store, chain = MemoryStore(), make_chain(1, 8)
    stored = chain.write(store)
    async with rig(store) as it:
        removed = StoreRemoved(key=stored.key, reason="evicted")  # the other copy deletes it
        it.keeper.changed(StoreChanged(sender="cache-2", removed=(removed,)))
        assert it.keeper.run_of(names(chain)) == 0
        assert stored.key in store.objects


class Undeletable(MemoryStore):
    is_read_only = True

    def delete(self, key: str) -> None:
        if self.is_read_only:
            raise StoreError("permission denied")
        super().delete(key)


async def test_an_object_that_cannot_be_deleted_comes_back_with_the_next_listing() -> None:
    store = Undeletable()
    chains = [make_chain(seed, 8) for seed in range(4)]
    sizes = [chain.write(store).num_bytes for chain in chains]
    async with rig(store, capacity_bytes=2 * sizes[0]) as it:
        await it.rescanned()
        assert len(store.objects) == 4
        store.is_read_only = False
        await it.until(lambda: len(store.objects) <= 2)
        await it.rescanned()
        assert it.keeper.index.num_bytes <= 2 * sizes[0]


async def test_news_of_what_is_no_object_are_passed_over() -> None:
    async with rig(MemoryStore()) as it:
        added = StoreAdded(key="../../etc/passwd", num_bytes=1)
        removed = StoreRemoved(key="../../etc/passwd", reason="checksum")
        it.keeper.changed(StoreChanged(sender="x", added=(added,), removed=(removed,)))
        await it.rescanned()
        assert it.keeper.index.num_objects == 0
