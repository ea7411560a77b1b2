"""Runs a scheduler's plans on the engine's own thread, and reports each step.

    event loop   schedule -> plan            update -> events -> on_step     schedule ...
    thread                   \\ runner.execute(plan) /

All bookkeeping happens on the event loop between two steps, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from libs.engine.kv.cache import KvCache
from libs.engine.plan import Runner, StepAbandoned, StepPlan
from libs.engine.scheduler import Scheduler
from libs.engine.sequence import Sequence
from libs.engine.step import StepEvent
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
        self._abandoned = threading.Event()  # read by the engine's thread
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
        if self.scheduler.is_step_unwanted:
            self._abandoned.set()
        self._note_empty()
        self._wake.set()
        return seq

    async def drain(self, timeout_s: float) -> bool:
        """Waits until no sequence is left; False if that takes longer. Submitting remains possible."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        return self._empty.is_set()

    async def stop(self, timeout_s: float) -> bool:
        """Ends `run` after the present step; sequences left over fail as DRAINING. False if the step takes longer."""
        self._stopping = True
        self._wake.set()
        if not self._started:
            self._shut_down()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), timeout_s)
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
                plan = self.scheduler.schedule()
                if plan is None:
                    await self._sleep()
                else:
                    await self._step(plan)
        except Exception as error:  # a bug here or in the scheduler
            self._break(error)
            raise
        finally:
            self._shut_down()

    async def _step(self, plan: StepPlan) -> None:
        started_ns = self._clock_ns()
        try:
            drawn = await self._execute(plan)
            events = self.scheduler.update(plan, drawn, started_ns, self._clock_ns())
        except StepAbandoned:
            self.scheduler.discard(plan)  # all its sequences were aborted: nobody to tell
        except StepTimeout as error:
            self._break(error)  # the plan stays out: its blocks may still be written
        except Exception as error:
            self._step_failed(plan, error, started_ns)
        else:
            self.num_steps += 1
            self._failures = 0
            self._emit(events)

    async def _execute(self, plan: StepPlan) -> tuple[Token | None, ...]:
        """Runs the plan in the thread. Cancelling waits for the thread all the same: it writes to the pool."""
        self._abandoned.clear()
        work = asyncio.get_running_loop().run_in_executor(
            self._executor, self._runner.execute, plan, self._abandoned.is_set
        )
        try:
            done, _ = await asyncio.wait({work}, timeout=self.config.step_timeout_s)
        except asyncio.CancelledError:
            done, _ = await asyncio.wait({work}, timeout=self.config.step_timeout_s)
            if done:
                self.scheduler.discard(plan)
            raise
        if not done:
            raise StepTimeout(f"a step of {len(plan.rows)} rows took over {self.config.step_timeout_s:g} s")
        return work.result()

    def _step_failed(self, plan: StepPlan, error: Exception, started_ns: int) -> None:
        self._failures += 1
        message = f"an engine step failed ({type(error).__name__})"
        failed = self.scheduler.discard(plan)
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
            await asyncio.wait_for(self._wake.wait(), timeout_s)
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
