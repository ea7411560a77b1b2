"""The coordinator without a bus: what it answers, what it counts, and how it recovers listings."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from libs.engine.kv.names import block_names
from libs.placement.policy import LongestPrefix
from libs.service.config import Settings
from libs.wire.errors import Code, NoResponder, RequestRefused
from libs.wire.messages import (
    BlockEvent,
    BlockEvents,
    Done,
    Dump,
    Heartbeat,
    Load,
    Placement,
    Role,
    Route,
    Source,
    StatusRequest,
)
from services.cache import sync as sync_module
from services.cache.coordinator import Coordinator

BLOCK = 16


@dataclass
class FakeWorkers:
    """Answers dumps for any number of workers; `fail` raises instead so many times."""

    names: dict[str, list[bytes]] = field(default_factory=dict)
    seq: dict[str, int] = field(default_factory=dict)
    epoch: dict[str, int] = field(default_factory=dict)
    fail: int = 0
    moving: bool = False
    fetched: Counter[str] = field(default_factory=Counter)
    page_size: int = 1000

    async def __call__(self, worker_id: str, offset: int) -> Dump:
        self.fetched[worker_id] += 1
        await asyncio.sleep(0)
        if self.fail:
            self.fail -= 1
            raise NoResponder("dump")
        if self.moving and offset:
            self.seq[worker_id] += 1
        names = self.names.get(worker_id, [])
        end = offset + self.page_size
        return Dump(
            worker_id=worker_id,
            epoch=self.epoch.get(worker_id, 1),
            seq=self.seq.get(worker_id, -1),
            names=tuple(names[offset:end]),
            next_offset=end if end < len(names) else None,
        )


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Rig:
    coordinator: Coordinator
    workers: FakeWorkers
    clock: Clock

    async def beat(self, worker_id: str, role: Role = "decode", **changes: object) -> None:
        fields: dict[str, object] = {
            "epoch": 1, "model": "name", "model_fingerprint": "m", "layout": "l", "context_length": 8192,
            "block_size": BLOCK, "state": "serving", "load": _load(),
        }  # fmt: skip
        heartbeat = Heartbeat(worker_id=worker_id, role=role, **{**fields, **changes})  # type: ignore[arg-type]
        await self.coordinator.on_heartbeat(heartbeat)

    async def route(self, request_id: str, tokens: Iterable[int], *exclude: str) -> Placement:
        tokens = list(tokens)
        names = block_names(b"root", tokens, BLOCK)
        route = Route(request_id=request_id, names=names, num_tokens=len(tokens), exclude=exclude)
        return await self.coordinator.on_route(route)

    async def done(self, request_id: str) -> None:
        await self.coordinator.on_done(Done(request_id=request_id))

    async def stored(self, worker_id: str, tokens: Iterable[int], first_seq: int, epoch: int = 1) -> int:
        """Publishes the blocks of a prompt; returns the next number."""
        names = block_names(b"root", list(tokens), BLOCK)
        await self.coordinator.on_events(
            BlockEvents(
                worker_id=worker_id,
                epoch=epoch,
                first_seq=first_seq,
                events=tuple(BlockEvent(True, name) for name in names),
            )
        )
        return first_seq + len(names)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


def _load(**changes: int) -> Load:
    fields = {"waiting": 0, "running": 0, "blocks_free": 1000, "blocks_cached": 0, "blocks_total": 1000,
              "queue_limit": 8}  # fmt: skip
    return Load(**{**fields, **changes})


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sync_module, "MIN_PAUSE_S", 0.01)
    workers, clock = FakeWorkers(), Clock()
    coordinator = Coordinator(
        "cache-test", Settings(), LongestPrefix(local_prefill_tokens=64), workers, clock
    )
    yield Rig(coordinator, workers, clock)
    await coordinator.sync.close()


async def test_without_a_decode_worker_it_refuses_and_says_when_to_try_again(rig: Rig) -> None:
    await rig.beat("p", "prefill")
    with pytest.raises(RequestRefused, match="no decode worker") as refusal:
        await rig.route("r", range(100))
    assert (refusal.value.code, refusal.value.retryable, refusal.value.retry_after_s) == (
        Code.NO_WORKER,
        True,
        1.0,
    )
    await rig.beat("d")
    with pytest.raises(RequestRefused, match="1 excluded"):
        await rig.route("r", range(100), "d")
    assert (await rig.route("r", range(100))).decode == "d"


async def test_hits_come_from_dumps_and_from_events(rig: Rig) -> None:
    rig.workers.names["p1"] = list(block_names(b"root", range(320), BLOCK))
    for worker_id, role in (("d", "decode"), ("p1", "prefill"), ("p2", "prefill")):
        await rig.beat(worker_id, role)
    await rig.until(lambda: rig.coordinator.sync.num_in_sync == 3)
    placement = await rig.route("r1", range(400))
    assert (placement.prefill, placement.prefill_hit_blocks) == ("p1", 20)
    await rig.stored("p2", range(400), 0)
    placement = await rig.route("r2", range(400))
    assert (placement.prefill, placement.decode_sources) == (None, (Source(worker_id="p2", num_blocks=25),))
    placement = await rig.route("r3", range(400), "p2")
    assert (placement.prefill, placement.prefill_hit_blocks) == ("p1", 20)


async def test_forty_paced_distinct_chats_spread(rig: Rig) -> None:
    """Row 55: each request ends before the next comes, so that load is zero whenever one is placed."""
    counts: Counter[str] = Counter()
    ids = ["d1", "d2", "p1", "p2"]
    seq = dict.fromkeys(ids, 0)
    for worker_id in ids:
        await rig.beat(worker_id, "decode" if worker_id[0] == "d" else "prefill")
    await rig.until(lambda: rig.coordinator.sync.num_in_sync == 4)
    for number in range(40):
        tokens = [*range(30), *range(1000 * number, 1000 * number + 50)]  # a template that all share
        placement = await rig.route(f"r{number}", tokens)
        for worker_id in (placement.decode, placement.prefill):
            assert worker_id is not None
            counts[worker_id] += 1
            seq[worker_id] = await rig.stored(worker_id, tokens, seq[worker_id])
        await rig.done(f"r{number}")
    assert min(counts[each] for each in ids) >= 10, counts


async def test_a_burst_with_one_cold_prefix_is_counted_at_dispatch(rig: Rig) -> None:
    """Row 55: no heartbeat and no block event comes between the sixteen."""
    counts: Counter[str] = Counter()
    ids = ["d1", "d2", "p1", "p2"]
    for worker_id in ids:
        await rig.beat(worker_id, "decode" if worker_id[0] == "d" else "prefill")
    for number in range(16):
        placement = await rig.route(f"r{number}", [*range(1000), number])
        counts.update([placement.decode, placement.prefill])
    assert all(counts[each] == 8 for each in ids), counts


async def test_a_warm_worker_does_not_get_all_of_a_burst(rig: Rig) -> None:
    counts: Counter[str | None] = Counter()
    for worker_id, role in (("d", "decode"), ("p1", "prefill"), ("p2", "prefill")):
        await rig.beat(worker_id, role)
    rig.workers.names["p1"] = list(block_names(b"root", range(160), BLOCK))
    rig.coordinator.sync.doubt_all()
    await rig.until(lambda: rig.coordinator.index.count("p1") == 10)
    for number in range(16):
        counts[(await rig.route(f"r{number}", [*range(160), *range(number, number + 160)])).prefill] += 1
    assert 8 <= counts["p1"] <= 12, counts


async def test_counts_end_at_zero_however_requests_end(rig: Rig) -> None:
    """Row 54: cancelled before, during and after placement; heartbeats tick meanwhile."""
    await rig.beat("d")
    await rig.beat("p", "prefill")
    for number in range(100):
        request_id = f"r{number}"
        if number % 4 == 0:
            await rig.done(request_id)  # the gateway gave up while its Route was on the way
        await rig.route(request_id, range(100))
        if number % 4 == 1:
            await rig.route(request_id, range(100))  # placed again after a failure
        await rig.beat("d", load=_load(running=1))
        await rig.done(request_id)
    for worker_id, role in (("d", "decode"), ("p", "prefill")):
        await rig.beat(worker_id, role)
        assert rig.coordinator.in_flight.of(worker_id).requests == 0
        assert rig.coordinator.in_flight.of(worker_id).queued_tokens == 0
    assert rig.coordinator.in_flight.num_requests == 0


async def test_draining_and_stopped_workers_get_nothing(rig: Rig) -> None:
    await rig.beat("d1")
    await rig.beat("d2")
    await rig.beat("d1", state="draining")
    assert {(await rig.route(f"r{n}", range(100))).decode for n in range(4)} == {"d2"}
    await rig.beat("d2", state="stopped")
    assert rig.coordinator.in_flight.of("d2").requests == 0
    with pytest.raises(RequestRefused, match="1 draining"):
        await rig.route("r", range(100))


async def test_a_full_queue_is_avoided_while_another_has_room(rig: Rig) -> None:
    await rig.beat("d1", load=_load(waiting=8))
    await rig.beat("d2", load=_load(waiting=7, running=20))
    assert {(await rig.route(f"r{n}", range(100))).decode for n in range(3)} == {"d2"}
    await rig.beat("d2", load=_load(waiting=8, running=20))
    assert (await rig.route("r", range(100))).decode == "d1"


async def test_a_silent_worker_is_lost_with_names_and_load(rig: Rig) -> None:
    rig.workers.names["d1"] = list(block_names(b"root", range(320), BLOCK))
    await rig.beat("d1")
    await rig.until(lambda: rig.coordinator.index.count("d1") == 20)
    await rig.route("r", range(100))
    for _ in range(12):
        rig.clock.now_s += 0.2
        await rig.beat("d2")
        rig.coordinator.tick(connected=True)
    assert [each.worker_id for each in rig.coordinator.fleet] == ["d2"]
    assert rig.coordinator.index.runs(block_names(b"root", range(320), BLOCK)) == {}
    assert rig.coordinator.in_flight.num_requests == 0 and rig.coordinator.counters.lost_workers == 1


async def test_who_could_not_hear_does_not_blame_the_others(rig: Rig) -> None:
    await rig.beat("d")
    rig.clock.now_s += 60  # this process was stopped
    rig.coordinator.tick(connected=True)
    for _ in range(50):  # the connection is away
        rig.clock.now_s += 0.2
        rig.coordinator.tick(connected=False)
    assert len(rig.coordinator.fleet) == 1
    fetched = rig.workers.fetched["d"]
    rig.coordinator.tick(connected=True)
    await rig.until(lambda: rig.workers.fetched["d"] > fetched)  # events may have been missed
    for _ in range(12):
        rig.clock.now_s += 0.2
        rig.coordinator.tick(connected=True)
    assert len(rig.coordinator.fleet) == 0


async def test_failing_dumps_are_asked_for_again_with_pauses(rig: Rig) -> None:
    rig.workers.names["d"] = list(block_names(b"root", range(320), BLOCK))
    rig.workers.fail = 3
    await rig.beat("d")
    await rig.until(lambda: rig.coordinator.index.count("d") == 20)
    assert rig.workers.fetched["d"] == 4


async def test_a_dump_of_many_pages_that_keeps_moving_is_taken_in_the_end(rig: Rig) -> None:
    rig.workers.names["d"] = list(block_names(b"root", range(320), BLOCK))
    rig.workers.seq["d"] = 0
    rig.workers.page_size, rig.workers.moving = 7, True
    await rig.beat("d")
    await rig.until(lambda: rig.coordinator.index.count("d") == 20)
    assert rig.workers.fetched["d"] == 2 + 2 + 3  # given up at the second page, twice


async def test_gaps_in_a_row_do_not_make_a_storm_of_dumps(rig: Rig) -> None:
    await rig.beat("d")
    await rig.until(lambda: rig.coordinator.sync.num_in_sync == 1)
    for number in range(1, 2000):
        await rig.stored("d", range(16), 2 * number)  # every second event is lost
        if number % 100 == 0:
            await asyncio.sleep(0.01)
    assert rig.workers.fetched["d"] <= 8
    rig.workers.seq["d"] = 5000
    await rig.until(lambda: rig.coordinator.sync.num_in_sync == 1)


async def test_a_worker_that_does_not_advance_through_its_listing_is_not_read_for_ever(rig: Rig) -> None:
    async def stuck(worker_id: str, offset: int) -> Dump:
        rig.workers.fetched[worker_id] += 1
        return Dump(worker_id=worker_id, epoch=1, seq=0, names=(), next_offset=5)

    rig.coordinator.sync._fetch = stuck
    await rig.beat("d")
    await asyncio.sleep(0.05)
    assert 2 <= rig.workers.fetched["d"] <= 12
    assert rig.coordinator.sync.num_in_sync == 0


async def test_a_worker_that_leaves_and_comes_back_during_a_dump_is_read_anew(rig: Rig) -> None:
    rig.workers.names["d"] = list(block_names(b"root", range(320), BLOCK))
    await rig.beat("d")
    await asyncio.sleep(0)
    await rig.beat("d", state="stopped")
    rig.workers.epoch["d"], rig.workers.names["d"] = 2, list(block_names(b"root", range(32), BLOCK))
    await rig.beat("d", epoch=2)
    await rig.until(lambda: rig.coordinator.sync.num_in_sync == 1)
    assert rig.coordinator.index.count("d") == 2


async def test_a_dump_that_cannot_be_cancelled_changes_nothing_after_its_worker_left(rig: Rig) -> None:
    """A client library may swallow a cancellation."""
    names = block_names(b"root", range(320), BLOCK)

    async def stubborn(worker_id: str, offset: int) -> Dump:
        rig.workers.fetched[worker_id] += 1
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.02)
        return Dump(worker_id=worker_id, epoch=1, seq=0, names=names)

    rig.coordinator.sync._fetch = stubborn
    await rig.beat("d")
    await asyncio.sleep(0.01)
    await rig.beat("d", state="stopped")
    await asyncio.sleep(0.2)
    fetched = rig.workers.fetched["d"]
    await asyncio.sleep(0.2)
    assert rig.workers.fetched["d"] == fetched
    assert rig.coordinator.index.runs(names) == {} and rig.coordinator.index.count("d") == 0


async def test_status_names_workers_of_another_model(rig: Rig) -> None:
    await rig.beat("d1", epoch=1)
    await rig.beat("p1", "prefill")
    await rig.beat("d2", model_fingerprint="other")
    await rig.beat("p2", "prefill", layout="strange")
    assert {(await rig.route(f"r{n}", range(100))).decode for n in range(4)} == {"d1"}
    status = await rig.coordinator.on_status(StatusRequest())
    assert status.service == "cache" and status.inflight == 4
    mismatch = status.detail["mismatch"]
    assert (
        isinstance(mismatch, str)
        and "d2 (model other" in mismatch
        and "p2 (model m, layout strange" in mismatch
    )
    assert "d1" not in mismatch
