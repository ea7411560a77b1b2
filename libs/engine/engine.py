"""Runs a scheduler's plans on the engine's own thread, and reports each step.

    event loop   prepare n+1          update n, events, on_step, prepare n+2          update n+1 ...
    thread       [ execute n         ][ resolve and execute n+1            ][ ...

While the thread executes a step, the event loop plans the one behind it, with tokens that are not known yet; the
thread fills them in when it has drawn them, and goes on at once. So bookkeeping costs no time between two steps. Where
the next step cannot be foreseen, it is planned after the present one, as the first one is. All bookkeeping happens on
the event loop, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from libs.engine.kv.cache import KvCache
from libs.engine.plan import Runner, StepAbandoned, StepPlan, resolve
from libs.engine.scheduler import Scheduler
from libs.engine.sequence import Sequence
from libs.engine.step import StepEvent, check_drawn
from libs.wire.errors import BatonError, Code, RequestRefused
from libs.wire.messages import Token

OnStep = Callable[[list[StepEvent]], None]
OnBroken = Callable[[BaseException], None]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How long the engine bears with its runner."""

    step_timeout_s: float = 120.0  # a longer step is a hung runner
    max_failures: int = 3  # failed steps in a row
    idle_poll_s: float = 1.0  # longest sleep without work


@dataclass(frozen=True, slots=True)
class Landing:
    """What the thread made of a plan."""

    plan: StepPlan  # as it was executed
    drawn: tuple[Token | None, ...]
    started_ns: int
    ended_ns: int


@dataclass(slots=True, eq=False)
class Flight:
    """A plan on its way through the thread."""

    plan: StepPlan
    work: Future[Landing]
    abandoned: threading.Event = field(default_factory=threading.Event)  # read by the thread


class StepTimeout(BatonError):
    """The runner did not come back. Its thread cannot be stopped: the process has to go (os._exit)."""


class Engine:
    """Owns the sequences that are submitted, until the event that ends them.

    - Each step's events go to `on_step`, synchronously and in order; a sequence gets exactly one event with a
      reason or an error, unless `abort` took it away. If it raises, the engine is broken.
    - A runner that raises costs the sequences of that step; after `max_failures` such steps in a row, or a step
      that does not end, the engine is broken: `on_broken(error)` is called once, every sequence fails, `run` returns.
    - However `run` ends, its thread has no further work and every sequence has had its last event.
    """

    def __init__(
        self,
        kv: KvCache,
        scheduler: Scheduler,
        runner: Runner,
        on_step: OnStep,
        *,
        on_broken: OnBroken | None = None,
        config: EngineConfig | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.kv = kv
        self.scheduler = scheduler
        self.config = config or EngineConfig()
        self.broken: BaseException | None = None
        self.num_steps = 0
        self._runner = runner
        self._on_step = on_step
        self._on_broken = on_broken
        self._clock_ns = clock_ns
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._failures = 0
        self._started = False
        self._stopping = False
        self._flights: list[Flight] = []  # the step being executed, and one behind it
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._stopped = asyncio.Event()
        kv.on_free(self._wake.set)

    # ------------------------------------------------------------ for the worker

    def submit(self, seq: Sequence) -> None:
        """Takes `seq` over. Raises RequestRefused: as `Scheduler.add`, DRAINING once stopped, INTERNAL if broken."""
        if self.broken is not None:
            raise RequestRefused(Code.INTERNAL, "the engine is broken", retryable=True)
        if self._stopping:
            raise RequestRefused(Code.DRAINING, "the engine has stopped", retryable=True)
        self.scheduler.add(seq)
        self._empty.clear()
        self._wake.set()

    def abort(self, request_id: str) -> Sequence | None:
        """Ends a sequence without an event; None if it is not here. Its blocks outlive a step that uses them."""
        seq = self.scheduler.remove(request_id)
        for flight in self._flights:
            if self.scheduler.is_unwanted(flight.plan):
                flight.abandoned.set()
        self._note_empty()
        self._wake.set()
        return seq

    async def drain(self, timeout_s: float) -> bool:
        """Waits until no sequence is left; False if that takes longer. Submitting remains possible."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        return self._empty.is_set()

    async def stop(self, timeout_s: float) -> bool:
        """Ends `run` after the present step (and the one behind it, if that has begun); sequences left over fail as
        DRAINING. False if that takes longer."""
        self._stopping = True
        self._wake.set()
        if not self._started:
            self._shut_down()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._stopped.wait()
        return self._stopped.is_set()

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Steps until `stop`, or until the engine breaks. To be called once."""
        self._started = True
        try:
            while not self._stopping:
                late = self.scheduler.expire(self._clock_ns())
                self._fail(late, Code.DEADLINE_EXCEEDED, "the request's deadline has passed", retryable=False)
                self._note_empty()
                if not self._flights:
                    plan = self.scheduler.schedule()
                    if plan is None:
                        await self._sleep()
                        continue
                    self._launch(plan)
                ahead = self.scheduler.prepare()
                if ahead is not None:
                    self._launch(ahead)
                if not await self._land(self._flights[0]):
                    await self._recall()  # what is behind it was planned for another end
        except Exception as error:  # a bug here or in the scheduler
            self._break(error)
            raise
        finally:
            await self._recall()
            self._shut_down()

    def _launch(self, plan: StepPlan) -> None:
        before = self._flights[-1] if self._flights else None
        flight = Flight(plan, Future())
        flight.work = self._executor.submit(self._fly, flight, before)
        self._flights.append(flight)

    def _fly(self, flight: Flight, before: Flight | None) -> Landing:
        """On the thread. Raises StepAbandoned where nobody wants it, or the step before did not end as foreseen."""
        if flight.abandoned.is_set():
            raise StepAbandoned
        plan = flight.plan
        if before is not None:
            try:
                landing = before.work.result(timeout=0)  # the thread is one, so it is done
                check_drawn(landing.plan, landing.drawn)
            except Exception as error:
                raise StepAbandoned from error
            plan = resolve(plan, landing.plan, landing.drawn)
        started_ns = self._clock_ns()
        drawn = self._runner.execute(plan, flight.abandoned.is_set) if plan.rows else ()
        return Landing(plan, drawn, started_ns, self._clock_ns())

    async def _land(self, flight: Flight) -> bool:
        """False where the step did not come to its end."""
        started_ns = self._clock_ns()
        try:
            landing = await self._wait(flight)
            self._flights.remove(flight)
            events = self.scheduler.update(landing.plan, landing.drawn, landing.started_ns, landing.ended_ns)
        except StepAbandoned:
            self._drop(flight)  # all its sequences were aborted: nobody to tell
        except StepTimeout as error:
            self._break(error)  # the plan stays out: its blocks may still be written
        except Exception as error:
            self._step_failed(flight, error, started_ns)
        else:
            self.num_steps += 1
            self._failures = 0
            self._emit(events)
            return True
        return False

    async def _wait(self, flight: Flight) -> Landing:
        work = asyncio.wrap_future(flight.work)
        done, _ = await asyncio.wait({work}, timeout=self.config.step_timeout_s)
        if not done:
            raise StepTimeout(
                f"a step of {len(flight.plan.rows)} rows took over {self.config.step_timeout_s:g} s"
            )
        return work.result()

    def _drop(self, flight: Flight) -> list[Sequence]:
        if flight in self._flights:
            self._flights.remove(flight)
        return self.scheduler.discard(flight.plan)

    async def _recall(self) -> None:
        """Takes back what is out: a step that has not begun never will, one that has is waited for."""
        for flight in list(reversed(self._flights)):
            flight.abandoned.set()
            if not flight.work.cancel() and not isinstance(self.broken, StepTimeout):
                work = asyncio.wrap_future(flight.work)
                done, _ = await asyncio.wait({work}, timeout=self.config.step_timeout_s)
                for each in done:
                    each.exception()  # looked at, or asyncio logs it as forgotten
            if flight.work.done():
                self._drop(flight)

    def _step_failed(self, flight: Flight, error: Exception, started_ns: int) -> None:
        self._failures += 1
        message = f"an engine step failed ({type(error).__name__})"
        failed = self._drop(flight)
        for seq in failed:
            self.scheduler.remove(seq.request_id)
        self._fail(failed, Code.INTERNAL, message, retryable=True, cause=error, started_ns=started_ns)
        if self._failures >= self.config.max_failures:
            self._break(error)

    async def _sleep(self) -> None:
        """Until something changes, the next deadline passes, or `idle_poll_s` is over."""
        timeout_s = self.config.idle_poll_s
        deadline_ns = self.scheduler.next_deadline_ns()
        if deadline_ns is not None:
            timeout_s = min(timeout_s, max(0.001, (deadline_ns - self._clock_ns()) / 1e9))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        self._wake.clear()

    # ------------------------------------------------------------ reporting

    def _fail(
        self,
        sequences: Iterable[Sequence],
        code: Code,
        message: str,
        *,
        retryable: bool,
        cause: BaseException | None = None,
        started_ns: int | None = None,
    ) -> None:
        now_ns = self._clock_ns()
        events = []
        for seq in sequences:
            error = RequestRefused(code, message, retryable=retryable)
            error.__cause__ = cause
            events.append(StepEvent(seq, error=error, started_ns=started_ns or now_ns, ended_ns=now_ns))
        self._emit(events)

    def _emit(self, events: list[StepEvent]) -> None:
        if events:
            try:
                self._on_step(events)
            except Exception as error:
                self._break(error)
        self.scheduler.reap()
        self._note_empty()

    def _note_empty(self) -> None:
        if self.scheduler.num_sequences == 0:
            self._empty.set()

    def _break(self, error: BaseException) -> None:
        if self.broken is None:
            self.broken = error
            self._stopping = True
            if self._on_broken is not None:
                self._on_broken(error)

    def _shut_down(self) -> None:
        """Every sequence that is left gets its end."""
        self._stopping = True
        left = self.scheduler.remove_all()
        if self.broken is None:
            self._fail(left, Code.DRAINING, "the engine was stopped", retryable=True)
        else:
            self._fail(left, Code.INTERNAL, "the engine is broken", retryable=True, cause=self.broken)
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._stopped.set()
