"""The engine's loop: steps in a thread, events, aborts, failures, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from libs.engine.engine import Engine, EngineConfig, StepTimeout
from libs.engine.fake import FakeModel, FakeRunner
from libs.engine.kv.cache import KvCache
from libs.engine.kv.layout import KvLayout
from libs.engine.kv.pool import KvPool
from libs.engine.plan import StepPlan
from libs.engine.scheduler import Scheduler, SchedulerConfig
from libs.engine.step import StepEvent
from libs.wire.errors import Code, RequestRefused
from tests.lifecycle.engine_rig import expected, new_sequence

A, B = [1] * 10, [2] * 10
PATIENCE_S = 30.0  # far above what anything here takes


class Gate:
    """Holds each step, in the engine's thread, until it is opened; then raises what it was told to."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.leave = threading.Semaphore(0)
        self.error: Exception | None = None
        self.plans: list[StepPlan] = []

    def __call__(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.entered.release()
        assert self.leave.acquire(timeout=PATIENCE_S)
        if self.error is not None:
            raise self.error

    async def wait_for_step(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=PATIENCE_S)

    def open(self, steps: int = 1) -> None:
        self.leave.release(steps)


@dataclass
class Bench:
    """A running engine and what it reported."""

    engine: Engine
    kv: KvCache
    task: asyncio.Task[None]
    events: list[StepEvent]
    broken: list[BaseException]

    def answer(self, request_id: str) -> list[int]:
        return [t.id for e in self.events if e.seq.request_id == request_id for t in e.tokens]

    def last(self, request_id: str) -> StepEvent:
        (event,) = [e for e in self.events if e.seq.request_id == request_id and e.is_last]
        return event

    def error(self, request_id: str) -> RequestRefused:
        error = self.last(request_id).error
        assert isinstance(error, RequestRefused)
        return error

    async def until(self, condition: Callable[[], bool]) -> None:
        await asyncio.wait_for(_poll(condition), PATIENCE_S)

    async def drained(self) -> None:
        assert await self.engine.drain(PATIENCE_S)
        await self.until(lambda: self.kv.used == 0)
        assert self.kv.free + self.kv.cached == self.kv.total


async def _poll(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - a condition of any kind
        await asyncio.sleep(0.002)


@asynccontextmanager
async def bench(
    num_blocks: int = 64,
    *,
    before_step: Callable[[StepPlan], None] | None = None,
    on_step: Callable[[list[StepEvent]], None] | None = None,
    model: FakeModel | None = None,
    engine_config: EngineConfig | None = None,
    **sizes: int,
) -> AsyncIterator[Bench]:
    pool = KvPool(KvLayout(1, 1, 2, 4, "f32"), num_blocks)
    kv = KvCache(num_blocks, 4)
    events: list[StepEvent] = []
    broken: list[BaseException] = []

    def note(step: list[StepEvent]) -> None:
        events.extend(step)
        if on_step is not None:
            on_step(step)

    engine = Engine(
        kv,
        Scheduler(kv, SchedulerConfig(**sizes)),
        FakeRunner(pool, model, before_step=before_step),
        note,
        on_broken=broken.append,
        config=engine_config,
    )
    task = asyncio.create_task(engine.run())
    try:
        yield Bench(engine, kv, task, events, broken)
    finally:
        await engine.stop(PATIENCE_S)
        await asyncio.wait({task}, timeout=PATIENCE_S)
        pool.close()


# ---------------------------------------------------------------- working


async def test_the_life_of_a_request() -> None:
    async with bench(max_chunk=6) as b:
        b.engine.submit(new_sequence("a", A, max_tokens=3))
        await b.drained()
        assert [(e.num_computed, len(e.tokens), e.reason) for e in b.events] == [
            (6, 0, None), (4, 1, None), (1, 1, None), (1, 1, "length"),
        ]  # fmt: skip
        assert b.answer("a") == expected(A, 3)
        times = [t for e in b.events for t in (e.started_ns, e.ended_ns)]
        assert times == sorted(times)
        assert abs(times[0] - time.time_ns()) < PATIENCE_S * 1e9


async def test_arrivals_join_the_running_batch() -> None:
    gate = Gate()
    async with bench(before_step=gate) as b:
        b.engine.submit(new_sequence("a", A, max_tokens=4))
        await gate.wait_for_step()
        b.engine.submit(new_sequence("b", B, max_tokens=2))
        gate.open(100)
        await b.drained()
        assert [[row.request_id for row in plan.rows] for plan in gate.plans] == [
            ["a"],
            ["a"],  # it was prepared when b came
            ["a", "b"],
            ["a", "b"],
        ]
        assert (b.answer("a"), b.answer("b")) == (expected(A, 4), expected(B, 2))


async def test_the_next_step_is_there_before_the_present_one_has_ended() -> None:
    """The loop is held at the end of step 1: the thread goes on to step 2 without it."""
    gate, handled = Gate(), threading.Event()

    def hold(events: list[StepEvent]) -> None:
        if not handled.is_set():
            gate.open()
            assert gate.entered.acquire(timeout=PATIENCE_S), (
                "step 2 began while the events of step 1 were handled"
            )
            handled.set()

    async with bench(before_step=gate, on_step=hold) as b:
        b.engine.submit(new_sequence("a", A, max_tokens=6))
        await gate.wait_for_step()
        gate.open(2)  # the first step, and the one in `hold`
        gate.open(100)
        await b.drained()
        assert handled.is_set()
        assert b.answer("a") == expected(A, 6)
        assert [row.tokens for plan in gate.plans[1:] for row in plan.rows] == [
            (token,) for token in expected(A, 5)
        ]


async def test_a_sequence_that_stops_has_no_row_in_the_step_that_was_prepared() -> None:
    gate = Gate()
    async with bench(before_step=gate, model=FakeModel(script={tuple(A): [7, 2]})) as b:
        b.engine.submit(new_sequence("a", A, max_tokens=9, stop=(2,)))
        b.engine.submit(new_sequence("b", B, max_tokens=4))
        gate.open(100)
        await b.drained()
        assert (b.answer("a"), b.last("a").reason) == ([7, 2], "stop")
        assert [[row.request_id for row in plan.rows] for plan in gate.plans] == [
            ["a", "b"],
            ["a", "b"],
            ["b"],
            ["b"],
        ]


async def test_what_was_prepared_behind_a_failed_step_is_not_executed() -> None:
    gate = Gate()
    async with bench(before_step=gate) as b:
        b.engine.submit(new_sequence("a", A, max_tokens=9))
        await gate.wait_for_step()
        gate.error = RuntimeError("no")
        gate.open()
        await b.until(lambda: bool(b.events))
        gate.error = None
        assert b.error("a").code is Code.INTERNAL
        b.engine.submit(new_sequence("b", B, max_tokens=2))
        gate.open(100)
        await b.drained()
        assert [[row.request_id for row in plan.rows] for plan in gate.plans] == [["a"], ["b"], ["b"]]
        assert b.answer("b") == expected(B, 2)


async def test_what_is_taken_back_is_not_logged_as_forgotten() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    gate = Gate()
    async with bench(before_step=gate) as b:
        b.engine.submit(new_sequence("a", A, max_tokens=9))
        await gate.wait_for_step()
        gate.error = RuntimeError("no")
        gate.open()
        await b.drained()
        gc.collect()  # futures complain when they are collected
        assert complaints == []


async def test_an_abort_in_the_running_and_in_the_prepared_step_frees_the_blocks_after_both() -> None:
    gate = Gate()
    async with bench(before_step=gate) as b:
        b.engine.submit(new_sequence("a", A, max_tokens=9))
        b.engine.submit(new_sequence("b", B, max_tokens=9))
        await gate.wait_for_step()
        gate.open()
        await gate.wait_for_step()  # step 2 executes, with a and b
        await b.until(lambda: b.engine.num_steps == 1)
        await asyncio.sleep(0)  # the loop has prepared step 3 when it waits again
        seq = b.engine.abort("a")
        assert seq is not None and seq.blocks
        gate.open()
        await gate.wait_for_step()  # step 3 executes: it still writes to the blocks of a
        await b.until(lambda: b.engine.num_steps == 2)
        held = {block for row in gate.plans[2].rows if row.request_id == "a" for block in row.blocks}
        assert held and held == set(seq.blocks)
        gate.open(100)
        await b.drained()
        assert seq.blocks == []
        assert b.answer("a") == expected(A, 1) and b.answer("b") == expected(B, 9)


@pytest.mark.parametrize("seed", range(6))
async def test_a_storm_gives_everybody_the_same_answer(seed: int) -> None:
    """Arrivals, aborts, stops and a pool that is too small for all, on an engine that plans ahead."""
    rng = random.Random(seed)
    async with bench(40, max_chunk=7, max_step_tokens=16) as b:
        prompts = {f"r{i}": [rng.randrange(50) for _ in range(rng.randint(1, 30))] for i in range(60)}
        limits = {name: rng.randint(1, 20) for name in prompts}
        stops = {name: expected(prompts[name], limits[name])[-1] for name in prompts if rng.random() < 0.3}
        aborted = set()
        for name, prompt in prompts.items():
            stop = (stops[name],) if name in stops else ()
            b.engine.submit(new_sequence(name, prompt, limits[name], stop=stop))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.01)
            if rng.random() < 0.2:
                victim = rng.choice(list(prompts))
                if b.engine.abort(victim) is not None:
                    aborted.add(victim)
        await b.drained()
        for name in prompts.keys() - aborted:
            answer = expected(prompts[name], limits[name])
            if name in stops:
                answer = answer[: answer.index(stops[name]) + 1]
            assert b.answer(name) == answer, f"seed {seed}, {name}"


async def test_an_idle_engine_wakes_for_work_and_for_blocks() -> None:
    async with bench(8, engine_config=EngineConfig(idle_poll_s=3600.0)) as b:
        held = new_sequence("held", [0], max_tokens=1)
        assert b.kv.grow(held, 32)
        await asyncio.sleep(0.02)
        b.engine.submit(new_sequence("a", A, max_tokens=2))
        await asyncio.sleep(0.02)
        assert b.events == []
        b.kv.release(held)  # a lease ended: nobody else tells the engine
        await b.drained()
        assert b.answer("a") == expected(A, 2)


async def test_an_engine_without_blocks_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(8) as b:
        calls: list[StepPlan | None] = []
        real = b.engine.scheduler.schedule

        def counted() -> StepPlan | None:
            calls.append(real())
            return calls[-1]

        monkeypatch.setattr(b.engine.scheduler, "schedule", counted)
        held = new_sequence("held", [0], max_tokens=1)
        assert b.kv.grow(held, 32)
        for name in "abc":
            b.engine.submit(new_sequence(name, A, max_tokens=2))
        await asyncio.sleep(0.1)
        assert len(calls) <= 5
        b.kv.release(held)
        await b.drained()


async def test_steps_run_one_after_the_other_in_a_thread_of_their_own() -> None:
    threads: list[str] = []
    async with bench(before_step=lambda plan: threads.append(threading.current_thread().name)) as b:
        for number in range(3):
            b.engine.submit(new_sequence(str(number), A, max_tokens=3))
        await b.drained()
    assert len(threads) == 3
    assert {name.split("_")[0] for name in threads} == {"engine"}


async def test_blocks_of_a_finished_request_stand_while_its_event_is_handled() -> None:
    pinned: list[int] = []

    def pin(events: list[StepEvent]) -> None:
        for event in events:
            if event.is_last:
                pinned.extend(event.seq.blocks)
                kv.ref(event.seq.blocks)

    async with bench(on_step=pin) as b:
        kv = b.kv
        b.engine.submit(new_sequence("a", A, max_tokens=1))
        await b.engine.drain(PATIENCE_S)
        await b.until(lambda: bool(pinned) and not b.events[-1].seq.blocks)
        assert (len(pinned), kv.used) == (3, 3)
        kv.unref(pinned)
        await b.drained()


# ---------------------------------------------------------------- aborts and deadlines


async def test_an_abort_of_an_executing_request_frees_its_blocks_after_the_step() -> None:
    gate = Gate()
    async with bench(before_step=gate) as b:
        b.engine.submit(new_sequence("a", A, max_tokens=5))
        b.engine.submit(new_sequence("b", B, max_tokens=1))
        await gate.wait_for_step()
        seq = b.engine.abort("a")
        assert seq is not None and len(seq.blocks) == 3
        assert b.kv.used == 6
        assert b.engine.abort("a") is None
        gate.open()
        await b.drained()
        assert {e.seq.request_id for e in b.events} == {"b"}


async def test_a_step_that_nobody_wants_any_more_is_abandoned_and_no_failure() -> None:
    gate = Gate()
    async with bench(before_step=gate) as b:
        b.engine.submit(new_sequence("a", A, 5))
        b.engine.submit(new_sequence("b", B, 5))
        await gate.wait_for_step()
        b.engine.abort("a")
        assert not b.engine.scheduler.is_unwanted(gate.plans[-1]), "b is still wanted"
        b.engine.abort("b")
        assert b.engine.scheduler.is_unwanted(gate.plans[-1])
        gate.open()
        await b.until(lambda: b.kv.used == 0)
        assert (b.engine.num_steps, b.events) == (0, [])
        for number in range(EngineConfig().max_failures + 1):  # as many in a row as one likes
            b.engine.submit(new_sequence(f"again-{number}", A, 5))
            await gate.wait_for_step()
            b.engine.abort(f"again-{number}")
            gate.open()
            await b.until(lambda: b.kv.used == 0)
        b.engine.submit(new_sequence("c", A, 3))
        gate.open(3)
        await b.until(lambda: bool(b.events) and b.events[-1].is_last)
        assert b.answer("c") == expected(A, 3) and b.broken == []


async def test_two_hundred_aborts_leave_nothing_behind() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompts: dict[str, list[int]] = {}
    aborted: set[str] = set()
    async with bench(48, max_rows=8, max_chunk=7, max_queue=1000) as b:
        for number in range(300):
            request_id = str(number)
            prompts[request_id] = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
            b.engine.submit(new_sequence(request_id, prompts[request_id], max_tokens=rng.randrange(1, 12)))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            if number % 3:
                victim = str(rng.randrange(number + 1))
                if b.engine.abort(victim) is not None:
                    aborted.add(victim)
        await b.drained()
        assert len(aborted) > 20
        for request_id, prompt in prompts.items():
            answer = b.answer(request_id)
            assert answer == expected(prompt, len(answer))
            if request_id not in aborted:
                last = b.last(request_id)
                assert (last.reason, len(answer)) == ("length", last.seq.limits.max_tokens)


async def test_a_deadline_is_an_end_also_for_those_who_wait_idle() -> None:
    async with bench(4, engine_config=EngineConfig(idle_poll_s=3600.0)) as b:
        held = new_sequence("held", [0], max_tokens=1)
        assert b.kv.grow(held, 16)
        b.engine.submit(new_sequence("a", A, max_tokens=2, deadline_ns=time.time_ns() + 50_000_000))
        await b.until(lambda: bool(b.events))
        assert (b.error("a").code, b.error("a").retryable) == (Code.DEADLINE_EXCEEDED, False)
        b.kv.release(held)
        await b.drained()


async def test_a_full_queue_refuses_and_forgets() -> None:
    gate = Gate()
    async with bench(before_step=gate, max_rows=1, max_queue=2) as b:
        b.engine.submit(new_sequence("0", A, max_tokens=1))
        await gate.wait_for_step()
        b.engine.submit(new_sequence("1", A, max_tokens=1))
        b.engine.submit(new_sequence("2", A, max_tokens=1))
        with pytest.raises(RequestRefused) as caught:
            b.engine.submit(new_sequence("3", A, max_tokens=1))
        assert caught.value.code is Code.OVERLOADED
        gate.open(100)
        await b.drained()
        assert {e.seq.request_id for e in b.events} == {"0", "1", "2"}


# ---------------------------------------------------------------- failures


async def test_a_failing_step_fails_its_requests_and_no_others() -> None:
    gate = Gate()
    gate.error = ValueError("a secret path")
    async with bench(before_step=gate, max_rows=2) as b:
        for name in "abc":
            b.engine.submit(new_sequence(name, A, max_tokens=2))
        await gate.wait_for_step()
        b.engine.abort("b")  # meanwhile
        gate.open()
        await gate.wait_for_step()
        gate.error = None
        gate.open(100)
        await b.drained()
        error = b.error("a")
        assert (error.code, error.retryable) == (Code.INTERNAL, True)
        assert isinstance(error.__cause__, ValueError)
        assert "secret" not in error.message
        assert (b.answer("a"), b.answer("b"), b.answer("c")) == ([], [], expected(A, 2))
        assert b.broken == []


async def test_a_runner_that_returns_nonsense_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench() as b:
        monkeypatch.setattr(FakeRunner, "execute", lambda self, plan, is_abandoned: ())
        b.engine.submit(new_sequence("a", A, max_tokens=2))
        await b.drained()
        assert b.error("a").code is Code.INTERNAL
        assert "PlanMismatch" in b.error("a").message


async def test_failures_that_do_not_follow_each_other_are_borne() -> None:
    count = 0

    def every_other(plan: StepPlan) -> None:
        nonlocal count
        count += 1
        if count % 2:
            raise RuntimeError("injected")

    async with bench(before_step=every_other, engine_config=EngineConfig(max_failures=2)) as b:
        for number in range(8):
            b.engine.submit(new_sequence(str(number), A, max_tokens=1))
            await b.drained()
        assert len([e for e in b.events if e.error is not None]) == 4
        assert (b.broken, b.engine.broken, b.task.done()) == ([], None, False)


async def test_an_engine_that_keeps_failing_says_so_and_stops() -> None:
    def fail(plan: StepPlan) -> None:
        raise RuntimeError("injected")

    async with bench(before_step=fail, max_rows=1, engine_config=EngineConfig(max_failures=3)) as b:
        for number in range(10):
            b.engine.submit(new_sequence(str(number), A, max_tokens=1))
        await asyncio.wait_for(b.task, PATIENCE_S)
        # 1. Three steps failed one request each; the others failed with the engine. None hangs.
        assert len([e for e in b.events if e.error is not None and e.is_last]) == 10
        assert all(b.error(str(number)).retryable for number in range(10))
        # 2. It told its owner once, takes nothing more, and holds nothing.
        assert [str(error) for error in b.broken] == ["injected"]
        with pytest.raises(RequestRefused) as caught:
            b.engine.submit(new_sequence("x", A, max_tokens=1))
        assert caught.value.code is Code.INTERNAL
        await b.drained()


async def test_a_step_that_never_ends_breaks_the_engine_but_keeps_its_blocks() -> None:
    gate = Gate()
    async with bench(before_step=gate, max_rows=1, engine_config=EngineConfig(step_timeout_s=0.05)) as b:
        b.engine.submit(new_sequence("a", A, max_tokens=1))
        b.engine.submit(new_sequence("b", B, max_tokens=1))
        await asyncio.wait_for(b.task, PATIENCE_S)
        assert isinstance(b.broken[0], StepTimeout)
        assert (b.error("a").code, b.error("b").code) == (Code.INTERNAL, Code.INTERNAL)
        assert b.kv.used == 3  # the runner may write there still
        gate.open()


@pytest.mark.parametrize("max_tokens", [1, 9])
async def test_a_receiver_that_raises_breaks_the_engine(max_tokens: int) -> None:
    calls = 0

    def first_fails(events: list[StepEvent]) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyError("bug in a worker")

    async with bench(on_step=first_fails) as b:
        b.engine.submit(new_sequence("a", A, max_tokens=max_tokens))
        await asyncio.wait_for(b.task, PATIENCE_S)
        assert isinstance(b.broken[0], KeyError)
        last = b.last("a")
        assert last.reason == "length" if max_tokens == 1 else b.error("a").code is Code.INTERNAL
        await b.drained()


async def test_a_bug_in_planning_breaks_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench() as b:
        monkeypatch.setattr(b.engine.scheduler, "schedule", lambda: [][0])
        b.engine.submit(new_sequence("a", A, max_tokens=9))
        with pytest.raises(IndexError):
            await asyncio.wait_for(b.task, PATIENCE_S)
        assert isinstance(b.broken[0], IndexError)
        assert b.error("a").code is Code.INTERNAL


# ---------------------------------------------------------------- ends


async def test_draining_waits_for_all_and_gives_up_in_time() -> None:
    gate = Gate()
    async with bench(before_step=gate) as b:
        assert await b.engine.drain(0.01)
        b.engine.submit(new_sequence("a", A, max_tokens=2))
        assert not await b.engine.drain(0.01)
        gate.open(100)
        await b.drained()
        assert b.answer("a") == expected(A, 2)


async def test_stopping_ends_every_request_after_the_present_step() -> None:
    gate = Gate()
    async with bench(before_step=gate, max_rows=1) as b:
        b.engine.submit(new_sequence("a", A, max_tokens=5))
        b.engine.submit(new_sequence("b", B, max_tokens=5))
        await gate.wait_for_step()
        assert not await b.engine.stop(0.01)
        assert not b.task.done()
        gate.open(100)
        assert await b.engine.stop(PATIENCE_S)
        assert (b.error("a").code, b.error("a").retryable) == (Code.DRAINING, True)
        assert b.error("b").code is Code.DRAINING
        with pytest.raises(RequestRefused) as caught:
            b.engine.submit(new_sequence("c", A, max_tokens=1))
        assert caught.value.code is Code.DRAINING
        await b.drained()


async def test_an_engine_that_never_ran_stops_as_well() -> None:
    kv = KvCache(8, 4)
    pool = KvPool(KvLayout(1, 1, 2, 4, "f32"), 8)
    events: list[StepEvent] = []
    engine = Engine(kv, Scheduler(kv, SchedulerConfig()), FakeRunner(pool), events.extend)
    engine.submit(new_sequence("a", A, max_tokens=5))
    assert await engine.stop(PATIENCE_S)
    assert [event.seq.request_id for event in events if event.error] == ["a"]
    pool.close()


async def test_a_cancelled_engine_waits_for_its_thread_and_ends_its_requests() -> None:
    gate = Gate()
    async with bench(before_step=gate) as b:
        b.engine.submit(new_sequence("a", A, max_tokens=5))
        await gate.wait_for_step()
        b.task.cancel()
        done, _ = await asyncio.wait({b.task}, timeout=0.05)
        assert not done
        gate.open(100)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(b.task, PATIENCE_S)
        assert b.error("a").code is Code.DRAINING
        await b.drained()


async def test_no_thread_is_left() -> None:
    def names() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("engine")}

    before = names()
    async with bench() as b:
        b.engine.submit(new_sequence("a", A, max_tokens=1))
        await b.drained()
        assert names() - before
    await asyncio.wait_for(_poll(lambda: names() == before), PATIENCE_S)
