"""The coordinator over a real nats-server, against workers that script what they hold and what gets lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from libs.engine.kv.names import block_names
from libs.placement.policy import LongestPrefix
from libs.service.bus import Bus, Incoming
from libs.service.config import Settings
from libs.wire import subjects
from libs.wire.errors import BusError, Code, NoResponder, RequestRefused
from libs.wire.messages import (
    BlockEvent,
    BlockEvents,
    Done,
    Dump,
    DumpRequest,
    Heartbeat,
    Load,
    Placement,
    Role,
    Route,
    ServiceStatus,
    StatusRequest,
)
from services.cache.coordinator import Coordinator
from services.cache.sync import nats_pages
from tests.natsd import port_of, start_nats, stop_nats

BLOCK = 16
BEAT_S = 0.1
PATIENCE_S = 10.0  # of waits that end as soon as what they wait for is there
ROOT = Path(__file__).parents[2]


class FakeWorker:
    """A worker without an engine: holds names, numbers events, answers dumps page by page, sends heartbeats."""

    def __init__(self, bus: Bus, worker_id: str, role: Role, *, epoch: int = 1, page_size: int = 10) -> None:
        self.worker_id = worker_id
        self.role = role
        self.epoch = epoch
        self.names: dict[bytes, None] = {}
        self.num_dumps = 0
        self.running = 0  # what its heartbeats say
        self.before_reply: Callable[[DumpRequest], Awaitable[None]] | None = None
        self._bus = bus
        self._page_size = page_size
        self._next_seq = 0
        self._listing: tuple[bytes, ...] = ()
        self._listing_seq = -1
        self._subscription = None
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> FakeWorker:
        self._subscription = await self._bus.subscribe(
            subjects.dump(self.worker_id), (DumpRequest,), self._dump
        )
        self._beating = asyncio.create_task(self._beat())
        return self

    async def die(self) -> None:
        """Without a word."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def restart(self) -> None:
        """A new process of the same id: empty, its numbers from 0."""
        await self.die()
        self.epoch += 1
        self.names.clear()
        self._next_seq = 0
        await self.start()

    def change(self, tokens: range, *, stored: bool = True) -> BlockEvents:
        """Stores or drops the blocks of a prompt; the message is the caller's to send, or not."""
        names = block_names(b"root", tokens, BLOCK)
        for name in names:
            if stored:
                self.names[name] = None
            else:
                del self.names[name]
        events = tuple(BlockEvent(stored, name) for name in names)
        message = BlockEvents(
            worker_id=self.worker_id, epoch=self.epoch, first_seq=self._next_seq, events=events
        )
        self._next_seq += len(events)
        return message

    async def send(self, *messages: BlockEvents) -> None:
        for message in messages:
            await self._bus.publish(subjects.block_events(self.worker_id), message)

    async def heartbeat(self, state: str = "serving") -> None:
        load = Load(waiting=0, running=self.running, blocks_free=1000, blocks_cached=0, blocks_total=1000,
                    queue_limit=8)  # fmt: skip
        beat = Heartbeat(
            worker_id=self.worker_id, role=self.role, epoch=self.epoch, model="name", model_fingerprint="m",
            layout="l", context_length=8192, block_size=BLOCK, load=load, state=state,
        )  # type: ignore[arg-type]  # fmt: skip
        await self._bus.publish(subjects.heartbeat(self.role, self.worker_id), beat)

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(BusError):  # the server is away: later
                await self.heartbeat()
            await asyncio.sleep(BEAT_S)

    async def _dump(self, request: DumpRequest, incoming: Incoming) -> Dump:
        if self.before_reply is not None:
            await self.before_reply(request)
        if request.offset == 0:
            self.num_dumps += 1
            self._listing, self._listing_seq = tuple(self.names), self._next_seq - 1
        end = request.offset + self._page_size
        return Dump(
            worker_id=self.worker_id,
            epoch=self.epoch,
            seq=self._listing_seq,
            names=self._listing[request.offset : end],
            next_offset=end if end < len(self._listing) else None,
        )


class Cluster:
    """One coordinator in this process, and any number of fake workers, on one server."""

    def __init__(self, url: str, bus: Bus, coordinator: Coordinator) -> None:
        self.url = url
        self.bus = bus
        self.coordinator = coordinator
        self.workers: list[FakeWorker] = []

    async def add(
        self, worker_id: str, role: Role = "decode", tokens: range = range(0), **options: int
    ) -> FakeWorker:
        worker = FakeWorker(self.bus, worker_id, role, **options)
        worker.change(tokens)
        self.workers.append(await worker.start())
        return worker

    async def route(self, request_id: str, tokens: range, *exclude: str) -> Placement:
        names = block_names(b"root", tokens, BLOCK)
        route = Route(request_id=request_id, names=names, num_tokens=len(tokens), exclude=exclude)
        return await self.bus.request(subjects.ROUTE, route, Placement, timeout_s=2)

    async def until_true(self, *workers: FakeWorker) -> None:
        """Until the index says what these workers hold, of all the names that ever were."""
        await until(lambda: all(self.knows(worker) for worker in workers))

    def knows(self, worker: FakeWorker) -> bool:
        index, worker_id = self.coordinator.index, worker.worker_id
        holds_all = all(worker_id in index.runs([name]) for name in worker.names)
        return holds_all and index.count(worker_id) == len(worker.names)


async def until(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(patience_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    url, process = start_nats(tmp_path)
    yield url, process
    stop_nats(process)


@pytest.fixture
async def cluster(nats: tuple[str, subprocess.Popen[bytes]]) -> AsyncIterator[Cluster]:
    url, _ = nats
    settings = Settings(heartbeat_s=BEAT_S)
    stop = asyncio.Event()
    async with await Bus.connect(url, "cache-test") as own, await Bus.connect(url, "workers") as bus:
        policy = LongestPrefix(local_prefill_tokens=64)
        coordinator = Coordinator("cache-test", settings, policy, nats_pages(own))
        serving = asyncio.create_task(coordinator.serve(own, stop))
        cluster = Cluster(url, bus, coordinator)
        await until(lambda: coordinator.state == "serving" or serving.done())
        yield cluster
        for worker in cluster.workers:
            await worker.die()
        stop.set()
        await asyncio.wait_for(serving, 5)


async def test_a_new_worker_is_read_page_by_page_and_used(cluster: Cluster) -> None:
    decode = await cluster.add("d")
    prefill = await cluster.add("p", "prefill", range(16 * 95))
    await cluster.until_true(decode, prefill)
    placement = await cluster.route("r", range(16 * 100))
    assert (placement.decode, placement.prefill) == ("d", "p")
    assert (placement.decode_hit_blocks, placement.prefill_hit_blocks) == (0, 95)
    assert prefill.num_dumps == 1


async def test_events_alone_keep_the_index_true(cluster: Cluster) -> None:
    worker = await cluster.add("d", tokens=range(320))
    await cluster.until_true(worker)
    for start in range(0, 2000, 100):
        await worker.send(worker.change(range(start, start + 160)))
        if start % 300 == 0:
            await worker.send(worker.change(range(start, start + 160), stored=False))
    await cluster.until_true(worker)
    assert worker.num_dumps == 1


async def test_lost_doubled_and_swapped_events_take_one_resync(cluster: Cluster) -> None:
    """Row 56."""
    worker = await cluster.add("d", tokens=range(320))
    await cluster.until_true(worker)
    first = worker.change(range(1000, 1160))
    worker.change(range(2000, 2160))  # lost
    third, fourth = worker.change(range(3000, 3160)), worker.change(range(1000, 1160), stored=False)
    await worker.send(first, first, fourth, third, first, fourth)
    await cluster.until_true(worker)
    assert worker.num_dumps == 2
    await worker.send(first, third)
    await worker.send(worker.change(range(4000, 4160)))
    await cluster.until_true(worker)
    assert worker.num_dumps == 2 and cluster.coordinator.sync.num_gaps == 1


async def test_events_that_come_during_a_dump_follow_it(cluster: Cluster) -> None:
    worker = FakeWorker(cluster.bus, "d", "decode", page_size=5)
    worker.change(range(320))

    async def meanwhile(request: DumpRequest) -> None:
        if request.offset == 10:
            await worker.send(worker.change(range(320), stored=False), worker.change(range(1000, 1160)))
            await worker.send(worker.change(range(160)))

    worker.before_reply = meanwhile
    cluster.workers.append(await worker.start())
    await cluster.until_true(worker)
    assert worker.num_dumps == 1


async def test_a_restarted_worker_starts_over(cluster: Cluster) -> None:
    """Row 56: the old mark must not make the new life's numbers look old."""
    worker = await cluster.add("d", tokens=range(1600))
    await cluster.until_true(worker)
    await worker.restart()
    await until(lambda: cluster.coordinator.index.count("d") == 0)
    await worker.send(worker.change(range(160)))
    await cluster.until_true(worker)
    await worker.restart()
    await worker.send(worker.change(range(320)))  # the events may overtake the first heartbeat
    await cluster.until_true(worker)


async def test_a_worker_that_dies_is_forgotten_with_its_load(cluster: Cluster) -> None:
    dead = await cluster.add("d1", tokens=range(160))
    alive = await cluster.add("d2")
    await cluster.until_true(dead, alive)
    for number in range(6):
        await cluster.route(f"r{number}", range(160))
    assert cluster.coordinator.in_flight.of("d1").requests > 0
    await dead.die()
    await until(lambda: len(cluster.coordinator.fleet) == 1)
    assert cluster.coordinator.in_flight.of("d1").requests == 0
    assert {(await cluster.route(f"s{n}", range(160))).decode for n in range(4)} == {"d2"}
    await alive.die()
    await alive.heartbeat(state="stopped")
    await until(lambda: len(cluster.coordinator.fleet) == 0)
    assert cluster.coordinator.counters.lost_workers == 1  # the other one had said so


async def test_no_worker_is_an_answer(cluster: Cluster) -> None:
    with pytest.raises(RequestRefused) as refusal:
        await cluster.route("r", range(100))
    assert (refusal.value.code, refusal.value.retryable, refusal.value.retry_after_s) == (
        Code.NO_WORKER,
        True,
        1.0,
    )


async def test_done_releases_and_status_tells(cluster: Cluster) -> None:
    worker = await cluster.add("d")
    worker.running = 1
    await until(lambda: cluster.coordinator.sync.num_in_sync == 1)
    await cluster.route("r", range(100))
    (status,) = await cluster.bus.gather(subjects.STATUS, StatusRequest(), ServiceStatus, window_s=0.3)
    assert (status.service, status.state, status.inflight, status.model) == ("cache", "serving", 1, "name")
    assert status.detail["decode_workers"] == 1
    await cluster.bus.publish(subjects.DONE, Done(request_id="r"))
    await until(lambda: cluster.coordinator.in_flight.num_requests == 0)


async def test_a_server_that_comes_back_finds_everything_in_place(
    cluster: Cluster, nats: tuple[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    url, server = nats
    worker = await cluster.add("d", tokens=range(160))
    await cluster.until_true(worker)
    stop_nats(server)
    lost = worker.change(range(1000, 1160))
    assert lost.events  # never sent: whoever was cut off must ask
    await asyncio.sleep(0.5)
    _, again = start_nats(tmp_path, port=port_of(url))
    try:
        await cluster.until_true(worker)
        assert (await cluster.route("r", range(160))).decode == "d"
        for each in cluster.workers:
            await each.die()
    finally:
        stop_nats(again)


async def test_two_coordinators_share_the_routes_and_all_events(cluster: Cluster) -> None:
    stop = asyncio.Event()
    async with await Bus.connect(cluster.url, "cache-2") as own:
        policy = LongestPrefix(local_prefill_tokens=64)
        second = Coordinator("cache-2", Settings(heartbeat_s=BEAT_S), policy, nats_pages(own))
        serving = asyncio.create_task(second.serve(own, stop))
        worker = await cluster.add("d", tokens=range(160))
        await until(lambda: second.state == "serving" and second.index.count("d") == 10)
        await cluster.until_true(worker)
        worker.running = 50  # so that nothing is taken for gone, however slow this machine
        for number in range(40):
            assert (await cluster.route(f"r{number}", range(160))).decode_hit_blocks == 10
        routed = (cluster.coordinator.counters.routes, second.counters.routes)
        assert sum(routed) == 40 and min(routed) > 0, routed
        stop.set()  # what is on its way to it is still answered, and the rest goes to the first
        asked = [asyncio.create_task(cluster.route(f"s{number}", range(160))) for number in range(50)]
        await serving
        await own.drain()
        await asyncio.gather(*asked)
        last = await cluster.route("last", range(160))
        assert last.decode_hit_blocks == 10
    for request_id in [*(f"r{number}" for number in range(40)), *(f"s{number}" for number in range(50))]:
        await cluster.bus.publish(subjects.DONE, Done(request_id=request_id))
    await until(lambda: cluster.coordinator.in_flight.num_requests == 1)


async def test_killed_and_started_again_it_knows_the_same(
    nats: tuple[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    url, _ = nats
    async with await Bus.connect(url, "workers") as bus:
        worker = FakeWorker(bus, "d", "decode", page_size=100)
        worker.change(range(16 * 500))
        await worker.start()
        for signum, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
            process = start_coordinator(url, tmp_path)
            try:
                placement = await _first_placement(bus, range(16 * 500))
                assert (
                    placement.decode_hit_blocks == 500
                )  # it answers no route before it has read the listing
            finally:
                process.send_signal(signum)
                ended = process.wait(timeout=10)
            assert ended == status
        await worker.die()


def start_coordinator(url: str, tmp_path: Path) -> subprocess.Popen[bytes]:
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "BATON_NATS_URL": url,
        "BATON_HEARTBEAT_S": str(BEAT_S),
        "BATON_STATE_DIR": str(tmp_path / "state"),
    }
    return subprocess.Popen([sys.executable, "-m", "services.cache"], env=environ, cwd=tmp_path)


async def _first_placement(bus: Bus, tokens: range) -> Placement:
    """Asks until there is a coordinator. A refusal would be a wrong answer: there is a worker."""
    route = Route(request_id="r", names=block_names(b"root", tokens, BLOCK), num_tokens=len(tokens))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            return await bus.request(subjects.ROUTE, route, Placement, timeout_s=1)
        except NoResponder:
            await asyncio.sleep(0.05)
    raise TimeoutError("no coordinator")
