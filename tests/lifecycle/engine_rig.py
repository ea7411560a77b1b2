"""A scheduler, a pool and a fake runner, driven step by step without an event loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from libs.engine.fake import FakeModel, FakeRunner, fake_continuation
from libs.engine.kv.cache import KvCache
from libs.engine.kv.layout import KvLayout
from libs.engine.kv.pool import KvPool
from libs.engine.plan import StepPlan
from libs.engine.scheduler import Scheduler, SchedulerConfig
from libs.engine.sequence import Sequence
from libs.engine.step import StepEvent
from libs.wire.messages import FinishReason, Limits, Sampling, Token

ROOT = b"r" * 32
FAR_NS = 1 << 62


def new_sequence(
    request_id: str,
    prompt: list[int],
    max_tokens: int,
    *,
    stop: tuple[int, ...] = (),
    deadline_ns: int = FAR_NS,
    sampling: Sampling | None = None,
) -> Sequence:
    limits = Limits(max_tokens=max_tokens, stop_token_ids=stop)
    return Sequence(request_id, ROOT, list(prompt), len(prompt), sampling or Sampling(), limits, deadline_ns)


def expected(prompt: list[int], max_tokens: int, model: FakeModel | None = None) -> list[int]:
    return fake_continuation(prompt, max_tokens, model)


@dataclass
class Rig:
    """`answers` and `reasons` collect what the events say, per request."""

    pool: KvPool
    kv: KvCache
    scheduler: Scheduler
    runner: FakeRunner
    answers: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    plan: StepPlan | None = None

    def add(self, seq: Sequence) -> Sequence:
        self.scheduler.add(seq)
        return seq

    def schedule(self) -> list[tuple[str, int, int]]:
        """(request id, start, end) of each row of the next plan, which `finish` executes."""
        self.plan = self.scheduler.schedule()
        return [] if self.plan is None else [(r.request_id, r.start, r.end) for r in self.plan.rows]

    def finish(self) -> list[StepEvent]:
        assert self.plan is not None
        events = self.scheduler.update(self.plan, self.runner.execute(self.plan))
        self.note(events)
        self.plan = None
        self.scheduler.reap()
        return events

    def step(self) -> list[tuple[str, int, int]]:
        rows = self.schedule()
        if rows:
            self.finish()
        return rows

    def run(self, max_steps: int = 10_000) -> int:
        """Steps until there is nothing to do; the number of steps. Fails if that takes more than `max_steps`."""
        for count in range(max_steps):
            if not self.step():
                return count
        raise AssertionError(f"not done after {max_steps} steps")

    def note(self, events: list[StepEvent]) -> None:
        for event in events:
            request_id = event.seq.request_id
            assert request_id not in self.reasons, "an event after the last one"
            self.answers.setdefault(request_id, []).extend(token.id for token in event.tokens)
            if event.reason is not None:
                self.reasons[request_id] = event.reason

    def assert_idle(self) -> None:
        assert self.scheduler.num_sequences == 0
        assert self.kv.used == 0
        assert self.kv.free + self.kv.cached == self.kv.total


@contextmanager
def rig(
    num_blocks: int, block_size: int = 4, *, model: FakeModel | None = None, **config: int
) -> Iterator[Rig]:
    pool = KvPool(KvLayout(1, 1, 2, block_size, "f32"), num_blocks)
    kv = KvCache(num_blocks, block_size)
    try:
        yield Rig(pool, kv, Scheduler(kv, SchedulerConfig(**config)), FakeRunner(pool, model))
    finally:
        pool.close()


def drawn_for(plan: StepPlan, token_id: int = 7) -> tuple[Token | None, ...]:
    return tuple(None if row.draw is None else Token(id=token_id) for row in plan.rows)
