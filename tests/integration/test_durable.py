"""The durable store behind live workers: fake runners whose answer depends on every byte, real NATS, real files."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from libs.engine.fake import FAKE_LAYOUT, fake_continuation
from libs.engine.kv.names import block_names, root_name
from libs.placement.policy import LongestPrefix
from libs.service.bus import Bus
from libs.service.outbox import Outbox
from libs.store.eviction import make_policy
from libs.store.file_store import FileStore
from libs.store.index import StoreIndex
from libs.store.interface import ObjectDamaged, Piece, StoredObject, StoreError, StoreFull
from libs.store.objects import BlockRecord, ObjectFormat, read_blocks
from libs.wire import subjects
from libs.wire.messages import Placement, Route
from libs.wire.store_messages import StoreChanged
from services.cache.coordinator import Coordinator
from services.cache.misses import Misses
from services.cache.store_keeper import StoreKeeper
from services.cache.sync import nats_pages
from tests.cluster import CARD, Client, Cluster, Running, cluster
from tests.integration.test_handoff import all_clean, prompt_of
from tests.natsd import nats_url

__all__ = ["nats_url"]

BLOCK = 16


class Broken(FileStore):
    """A file store that fails when it is told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.put_error: StoreError | None = None
        self.read_error: StoreError | None = None
        self.put_gate, self.read_gate = threading.Event(), threading.Event()
        self.put_gate.set()
        self.read_gate.set()

    def put(self, key: str, parts: list[bytes | memoryview]) -> None:  # type: ignore[override]
        assert self.put_gate.wait(20)
        if self.put_error is not None:
            raise self.put_error
        super().put(key, parts)

    def read(self, key: str, pieces: list[Piece]) -> None:  # type: ignore[override]
        assert self.read_gate.wait(20)
        if self.read_error is not None:
            raise self.read_error
        super().read(key, pieces)


OTHER_LAYOUT = replace(FAKE_LAYOUT, dtype="f16")


@dataclass
class Kept:
    """A cluster with one decode worker, a coordinator and a store."""

    running: Cluster
    client: Client
    store: Broken
    coordinator: Coordinator
    root: Path

    @property
    def decode(self) -> Running:
        return self.running.workers["decode-1"]

    async def ask(
        self, request_id: str, prompt: list[int], **options: object
    ) -> tuple[list[int], int, int, str]:
        """Placed by the coordinator, computed by decode: ids, cached tokens, those from the store, miss."""
        placement = await self.place(request_id, prompt)
        answer = await self.client.ask(
            request_id, prompt, prefill=None, store_blocks=placement.store_blocks, **options
        )
        assert answer.end is not None
        cached = answer.end.cached  # type: ignore[union-attr]
        return answer.ids, cached.tokens, cached.from_store, cached.miss or placement.miss

    async def place(self, request_id: str, prompt: list[int], tenant: str = "default") -> Placement:
        root = root_name(CARD.fingerprint, CARD.layout.fingerprint, tenant)
        names = block_names(root, prompt, BLOCK)
        route = Route(request_id=request_id, names=names, num_tokens=len(prompt))
        return await self.client.bus.request(subjects.ROUTE, route, Placement, timeout_s=2)

    async def written(self, blocks: int) -> None:
        """Until the coordinator knows that so many blocks are in the store."""
        assert self.coordinator.store is not None
        index = self.coordinator.store.index
        await self.client.until(lambda: index.num_blocks >= blocks)

    def objects(self) -> list[StoredObject]:
        return [each for page in self.store.list() for each in page]


@asynccontextmanager
async def kept(
    url: str, directory: Path, *, num_blocks: int = 64, capacity_bytes: int = 1 << 30
) -> AsyncIterator[Kept]:
    root = directory / "store"
    store = Broken(root)
    async with cluster(url, directory) as (running, client):
        await running.add("decode", "decode-1", store=store, num_blocks=num_blocks)
        async with coordinating(url, "cache-t", running, client, root, capacity_bytes) as coordinator:
            yield Kept(running, client, store, coordinator, root)


@asynccontextmanager
async def coordinating(
    url: str, own_id: str, running: Cluster, client: Client, root: Path, capacity_bytes: int = 1 << 30
) -> AsyncIterator[Coordinator]:
    bus = await Bus.connect(url, own_id)
    outbox, misses = Outbox(bus), Misses()
    index = StoreIndex(make_policy("lru"), capacity_bytes=capacity_bytes)

    def tell(news: StoreChanged) -> None:
        outbox.put(subjects.STORE_CHANGED, news)

    keeper = StoreKeeper(own_id, FileStore(root), index, misses, tell, rescan_s=0.5)
    coordinator = Coordinator(
        own_id, running.settings, LongestPrefix(64), nats_pages(bus), misses=misses, store=keeper
    )
    stop = asyncio.Event()
    tasks = [asyncio.create_task(outbox.run()), asyncio.create_task(coordinator.serve(bus, stop))]
    try:
        await client.until(lambda: coordinator.state == "serving")
        yield coordinator
        assert not any(task.done() for task in tasks), [task.exception() for task in tasks if task.done()]
    finally:
        stop.set()
        await asyncio.wait(tasks[1:], timeout=5)
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await bus.close()


def second_coordinator(it: Kept) -> AbstractAsyncContextManager[Coordinator]:
    return coordinating(it.running.url, "cache-u", it.running, it.client, it.root)


async def test_a_prompt_outlives_its_worker_and_its_coordinator(nats_url: str, tmp_path: Path) -> None:
    prompt = prompt_of(200)
    async with kept(nats_url, tmp_path) as first:
        ids, cached, _, miss = await first.ask("cold", prompt)
        assert (ids, cached, miss) == (fake_continuation(prompt, 8), 0, "never seen")
        await first.written(12)
    async with kept(nats_url, tmp_path) as second:
        ids, cached, from_store, _ = await second.ask("warm", prompt)
        assert (ids, cached, from_store) == (fake_continuation(prompt, 8), 192, 192)
        again = await second.ask("again", prompt)
        assert again == (ids, 192, 0, "")  # now they are in the pool
        await all_clean(second.running)


async def test_what_decode_wrote_is_kept_too(nats_url: str, tmp_path: Path) -> None:
    prompt = prompt_of(40)
    async with kept(nats_url, tmp_path) as first:
        ids, *_ = await first.ask("one", prompt, max_tokens=60)
        await first.written(6)
    turn = prompt + ids + prompt_of(20, seed=2)
    async with kept(nats_url, tmp_path) as second:
        answer, cached, from_store, _ = await second.ask("two", turn)
        assert (answer, cached, from_store) == (fake_continuation(turn, 8), 96, 96)


async def test_nothing_is_written_twice(nats_url: str, tmp_path: Path) -> None:
    prompt = prompt_of(200)
    async with kept(nats_url, tmp_path) as first:
        await first.ask("cold", prompt)
        await first.written(12)
        await first.running.add("prefill", "prefill-1", store=Broken(first.root))
        await first.client.ask("apart", prompt)  # prefill computes it anew
        writer = first.running.workers["prefill-1"].host._durable.writer  # type: ignore[union-attr]
        await first.client.until(lambda: writer.num_waiting == 0)
        assert writer.counts.written == 0
        assert sum(each.num_bytes for each in first.objects()) < 14 * (CARD.layout.block_bytes + 4096)


@pytest.mark.parametrize("damage", ["flip", "short", "empty", "header"])
async def test_damage_is_a_counted_miss_and_the_cold_text(nats_url: str, tmp_path: Path, damage: str) -> None:
    prompt = prompt_of(200)
    async with kept(nats_url, tmp_path) as first:
        await first.ask("cold", prompt)
        await first.written(12)
        objects = first.objects()
    for each in objects:
        path = tmp_path / "store" / each.key
        data = bytearray(path.read_bytes())
        if damage == "flip":
            data[-5] ^= 1
        elif damage == "header":
            data[9] ^= 1
        path.write_bytes({"short": data[:-1], "empty": b""}.get(damage, bytes(data)))
    async with kept(nats_url, tmp_path) as second:
        ids, cached, _, miss = await second.ask("warm", prompt)
        assert ids == fake_continuation(prompt, 8)
        assert cached < 192 and miss.startswith("store: ")
        loader = second.decode.host.loader
        assert loader is not None and sum(loader.failures.values()) == 1
        await all_clean(second.running)
        # The damaged object is taken away, and its blocks are written again.
        await second.client.until(lambda: bool(second.coordinator.store.removed))  # type: ignore[union-attr]


async def test_a_store_that_vanishes_costs_only_the_computing(nats_url: str, tmp_path: Path) -> None:
    prompt = prompt_of(200)
    async with kept(nats_url, tmp_path) as first:
        await first.ask("cold", prompt)
        await first.written(12)
    async with kept(nats_url, tmp_path) as second:
        shutil.rmtree(tmp_path / "store")
        ids, cached, _, miss = await second.ask("warm", prompt)
        assert (ids, cached, miss) == (fake_continuation(prompt, 8), 0, "store: gone")
        await all_clean(second.running)


async def test_a_full_disk_stops_writing_and_not_serving(nats_url: str, tmp_path: Path) -> None:
    async with kept(nats_url, tmp_path) as it:
        it.store.put_error = StoreFull("no space left on device")
        ids, *_ = await it.ask("one", prompt_of(200))
        assert ids == fake_continuation(prompt_of(200), 8)
        durable = it.decode.host._durable
        assert durable is not None
        await it.client.until(lambda: durable.writer.num_waiting == 0)
        assert durable.detail()["store"] == "no space left on device"
        assert (durable.writer.counts.written, durable.writer.counts.dropped) == (0, 12)
        assert not it.objects()
        await all_clean(it.running)


async def test_a_store_that_fails_to_read_costs_only_the_computing(nats_url: str, tmp_path: Path) -> None:
    prompt = prompt_of(300)
    async with kept(nats_url, tmp_path) as first:
        await first.ask("cold", prompt)
        await first.written(18)
    async with kept(nats_url, tmp_path) as second:
        second.store.read_error = StoreError("connection refused")
        ids, cached, _, miss = await second.ask("warm", prompt)
        assert (ids, cached, miss) == (fake_continuation(prompt, 8), 0, "store: failed")
        second.store.read_error = None
        await all_clean(second.running)


async def test_tenants_do_not_see_each_other(nats_url: str, tmp_path: Path) -> None:
    """Row 33: nothing that a request says makes another tenant's blocks found."""
    prompt = prompt_of(200)
    async with kept(nats_url, tmp_path) as it:
        await it.ask("mine", prompt)
        await it.written(12)
        placement = await it.place("theirs", prompt, tenant="other")
        assert (placement.store_blocks, placement.decode_hit_blocks) == (0, 0)
        assert placement.miss == "never seen"


@pytest.mark.parametrize("change", [{"fingerprint": "perturbed-weights"}, {"layout": OTHER_LAYOUT}])
async def test_another_model_or_dtype_finds_nothing_under_the_same_folder(
    nats_url: str, tmp_path: Path, change: dict[str, object]
) -> None:
    """Row 49: weights and dtype are part of every name."""
    prompt = prompt_of(200)
    async with kept(nats_url, tmp_path) as it:
        await it.ask("one", prompt)
        await it.written(12)
        card = replace(CARD, **change)  # type: ignore[arg-type]
        names = block_names(root_name(card.fingerprint, card.layout.fingerprint, "default"), prompt, BLOCK)
        assert it.coordinator.store is not None and it.coordinator.store.run_of(names) == 0
        objects = ObjectFormat(card.fingerprint, card.layout)
        record = BlockRecord(names[0], tuple(prompt[:BLOCK]))
        target = memoryview(bytearray(card.layout.block_bytes))
        with pytest.raises(ObjectDamaged, match="not these"):
            read_blocks(it.store, objects, it.objects()[0].key, 0, [record], [target])


async def test_each_copy_of_the_coordinator_knows_everything(nats_url: str, tmp_path: Path) -> None:
    prompt = prompt_of(200)
    async with kept(nats_url, tmp_path) as it, second_coordinator(it) as copy:
        await it.ask("one", prompt)
        await it.written(12)
        root = root_name(CARD.fingerprint, CARD.layout.fingerprint, "default")
        names = block_names(root, prompt, BLOCK)
        assert copy.store is not None
        await it.client.until(lambda: copy.store.run_of(names) == 12)  # type: ignore[union-attr]
        await it.client.until(lambda: copy.index.runs(names) == {"decode-1": 12})


async def test_eviction_leaves_room_and_says_so(nats_url: str, tmp_path: Path) -> None:
    one_object = 8 * CARD.layout.block_bytes + 8192
    async with kept(nats_url, tmp_path, num_blocks=32, capacity_bytes=4 * one_object) as it:
        prompts = [prompt_of(256, seed=seed) for seed in range(8)]
        for number, prompt in enumerate(prompts):
            await it.ask(f"fill-{number}", prompt)
            await asyncio.sleep(0.1)
        keeper = it.coordinator.store
        assert keeper is not None
        await it.client.until(lambda: keeper.removed["evicted"] > 0)
        await it.client.until(lambda: sum(each.num_bytes for each in it.objects()) <= 4 * one_object)
        ids, cached, _, miss = await it.ask("again", prompts[0])
        assert (ids, cached, miss) == (fake_continuation(prompts[0], 8), 0, "evicted")
        await all_clean(it.running)


async def test_a_slow_store_is_given_up(nats_url: str, tmp_path: Path) -> None:
    prompt = prompt_of(300)
    async with kept(nats_url, tmp_path) as first:
        await first.ask("cold", prompt)
        await first.written(18)
    async with kept(nats_url, tmp_path, num_blocks=128) as second:
        await second.ask("rate", prompt_of(200, seed=9))  # so the worker knows how fast it computes
        second.store.read_gate.clear()
        ids, cached, _, miss = await second.ask("warm", prompt)
        assert (ids, cached, miss) == (fake_continuation(prompt, 8), 0, "store: slow")
        assert second.decode.host.kv.used > 0, "blocks that a thread may still write to were given away"
        second.store.read_gate.set()
        await all_clean(second.running)


async def test_an_abort_while_loading_frees_blocks_when_the_readers_are_done(
    nats_url: str, tmp_path: Path
) -> None:
    prompt = prompt_of(300)
    async with kept(nats_url, tmp_path) as first:
        await first.ask("cold", prompt)
        await first.written(18)
    async with kept(nats_url, tmp_path) as second:
        second.store.read_gate.clear()
        placement = await second.place("gone", prompt)
        await second.client.submit("gone", prompt, prefill=None, store_blocks=placement.store_blocks)
        kv = second.decode.host.kv
        await second.client.until(lambda: kv.used >= 18)
        await second.client.abort("gone")
        await second.client.until(lambda: second.decode.worker.num_requests == 0)
        assert kv.used >= 8
        second.store.read_gate.set()
        await all_clean(second.running)
        answer = await second.ask("after", prompt)
        assert answer[0] == fake_continuation(prompt, 8)


async def test_blocks_that_are_evicted_before_their_turn_are_lost_and_counted(
    nats_url: str, tmp_path: Path
) -> None:
    async with kept(nats_url, tmp_path, num_blocks=24) as it:
        it.store.put_gate.clear()
        for seed in range(4):
            ids, *_ = await it.ask(f"{seed}", prompt_of(200, seed=seed))
            assert ids == fake_continuation(prompt_of(200, seed=seed), 8)
        it.store.put_gate.set()
        durable = it.decode.host._durable
        assert durable is not None
        await it.client.until(lambda: durable.writer.num_waiting == 0)
        counts = durable.writer.counts
        assert counts.lost > 0 and counts.written + counts.lost + counts.dropped == 4 * 12
        await all_clean(it.running)


async def test_everything_that_waits_is_written_or_counted(nats_url: str, tmp_path: Path) -> None:
    """The same blocks, computed again and again while the first ones wait in a pool that is too small for them."""
    async with kept(nats_url, tmp_path, num_blocks=24) as it:
        durable = it.decode.host._durable
        assert durable is not None
        for number in range(12):
            await it.ask(f"{number}", prompt_of(150, seed=number % 3), max_tokens=30)
        await it.client.until(lambda: durable.writer.num_waiting == 0)
        await all_clean(it.running)
