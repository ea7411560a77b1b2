"""Plans that are made before the step in front of them has ended, step by step and without an event loop."""

from __future__ import annotations

import os
import random

import pytest

from libs.engine.fake import FakeModel
from libs.engine.plan import StepPlan, resolve
from libs.engine.sequence import Sequence, Status
from libs.engine.step import PlanMismatch, StepEvent
from libs.wire.messages import Token
from tests.lifecycle.engine_rig import Rig, expected, new_sequence, rig

A, B = [1] * 10, [2] * 10
MODEL = FakeModel(vocab_size=3)  # answers that repeat make for shared prefixes
BASE_SEED = int(os.environ.get("BATON_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
Drawn = tuple[Token | None, ...]


def scheduled(r: Rig) -> StepPlan:
    plan = r.scheduler.schedule()
    assert plan is not None
    return plan


def prepared(r: Rig) -> StepPlan:
    plan = r.scheduler.prepare()
    assert plan is not None
    return plan


def land(r: Rig, plan: StepPlan, drawn: Drawn) -> list[StepEvent]:
    events = r.scheduler.update(plan, drawn)
    r.note(events)
    r.scheduler.reap()
    return events


def test_a_decode_is_planned_before_its_token_is_known() -> None:
    with rig(16) as r:
        r.add(new_sequence("a", A, 3))
        first = scheduled(r)
        ahead = prepared(r)
        (row,) = ahead.rows
        assert (row.start, row.end, row.stops) == (10, 11, frozenset())
        drawn = r.runner.execute(first)
        second = resolve(ahead, first, drawn)
        assert second.rows[0].tokens == tuple(expected(A, 1))
        drawn_2 = r.runner.execute(second)  # before the first is taken in
        land(r, first, drawn)
        assert prepared(r).rows[0].start == 11
        land(r, second, drawn_2)
        assert r.answers["a"] == expected(A, 2)


def test_a_sequence_that_is_certain_to_end_is_not_planned_ahead() -> None:
    with rig(16) as r:
        r.add(new_sequence("a", A, 1))
        r.add(new_sequence("b", B, 2))
        scheduled(r)
        assert [row.request_id for row in prepared(r).rows] == ["b"]


def test_the_chunk_behind_a_chunk_holds_known_tokens_only() -> None:
    prompt = list(range(10))
    with rig(16, max_chunk=6) as r:
        r.add(new_sequence("a", prompt, 2))
        first = scheduled(r)
        (row,) = prepared(r).rows
        assert (row.tokens, row.stops) == ((6, 7, 8, 9), None)
        assert row.draw is not None and row.draw.position == 10
        land(r, first, r.runner.execute(first))


def test_nothing_is_planned_ahead_of_an_arrival_of_missing_blocks_or_of_a_third_plan() -> None:
    with rig(3) as r:
        assert r.scheduler.prepare() is None, "no plan is out"
        r.add(new_sequence("a", [1] * 12, 9))
        first = scheduled(r)
        assert r.scheduler.prepare() is None, "a fourth block is not there"
        land(r, first, r.runner.execute(first))
    with rig(16) as r:
        r.add(new_sequence("a", A, 9))
        scheduled(r)
        r.add(new_sequence("b", B, 9))
        assert r.scheduler.prepare() is None, "b is to be admitted"
        assert r.scheduler.remove("b") is not None
        assert r.scheduler.prepare() is not None
        assert r.scheduler.prepare() is None, "two are out"


def test_the_blocks_of_a_sequence_that_stops_outlive_the_plan_behind() -> None:
    with rig(16, model=FakeModel(script={tuple(A): [7]})) as r:
        seq = r.add(new_sequence("a", A, 9, stop=(7,)))
        first, ahead = scheduled(r), prepared(r)
        drawn = r.runner.execute(first)
        second = resolve(ahead, first, drawn)
        assert second.rows == ()
        land(r, first, drawn)
        assert r.reasons == {"a": "stop"} and seq.blocks
        land(r, second, ())
        r.assert_idle()


def test_the_blocks_of_an_aborted_sequence_outlive_both_plans() -> None:
    with rig(16) as r:
        seq = r.add(new_sequence("a", A, 9))
        first, ahead = scheduled(r), prepared(r)
        assert r.scheduler.remove("a") is seq
        assert r.scheduler.is_unwanted(first) and r.scheduler.is_unwanted(ahead)
        drawn = r.runner.execute(first)
        second = resolve(ahead, first, drawn)
        assert land(r, first, drawn) == [] and seq.blocks
        assert land(r, second, r.runner.execute(second)) == []
        assert r.answers == {}
        r.assert_idle()


def test_the_blocks_of_a_sequence_in_the_plan_behind_alone_outlive_it() -> None:
    with rig(16, max_step_tokens=8, max_chunk=4) as r:
        r.add(new_sequence("a", [1] * 12, 1))
        seq = r.add(new_sequence("b", [2] * 12, 1))
        r.step()
        for number in range(4):  # they leave no room for b
            r.add(new_sequence(str(number), [number], 1))
        first, ahead = scheduled(r), prepared(r)
        assert "b" not in [row.request_id for row in first.rows]
        assert "b" in [row.request_id for row in ahead.rows]
        r.scheduler.remove("b")
        assert seq.blocks
        land(r, first, r.runner.execute(first))
        assert seq.blocks
        land(r, ahead, r.runner.execute(ahead))
        assert seq.blocks == []


def test_an_id_that_returns_is_another_sequence_than_the_one_in_both_plans() -> None:
    with rig(16) as r:
        r.add(new_sequence("a", A, 9))
        first, ahead = scheduled(r), prepared(r)
        r.scheduler.remove("a")
        again = r.add(new_sequence("a", B, 2))
        drawn = r.runner.execute(first)
        second = resolve(ahead, first, drawn)
        assert land(r, first, drawn) == []
        assert r.scheduler.prepare() is None
        assert land(r, second, r.runner.execute(second)) == []
        assert again.status is Status.WAITING and again.num_tokens == len(B)
        r.run()
        assert r.answers["a"] == expected(B, 2)
        r.assert_idle()


def test_events_of_a_step_see_nothing_of_the_plan_behind_it() -> None:
    """What is named and computed when a step has landed is the same, whether another one was planned or not."""
    seen = []
    for ahead in (False, True):
        with rig(16) as r:
            seq = r.add(new_sequence("a", A, 9))
            for _ in range(3):
                plan = scheduled(r)
                behind = r.scheduler.prepare() if ahead else None
                (event,) = land(r, plan, r.runner.execute(plan))
                seen.append((ahead, seq.num_computed, len(seq.names), event.num_computed, event.tokens))
                if behind is not None:
                    r.scheduler.discard(behind)
    assert [each[1:] for each in seen[:3]] == [each[1:] for each in seen[3:]]


def test_two_plans_are_taken_back_and_planned_again() -> None:
    with rig(16) as r:
        r.add(new_sequence("a", A, 4))
        first, ahead = scheduled(r), prepared(r)
        r.runner.execute(first)
        assert [seq.request_id for seq in r.scheduler.discard(ahead)] == ["a"]
        assert [seq.request_id for seq in r.scheduler.discard(first)] == ["a"]
        r.run()
        assert r.answers["a"] == expected(A, 4)
        r.assert_idle()


def test_results_that_do_not_fit_change_nothing_with_a_plan_behind() -> None:
    with rig(16) as r:
        seq = r.add(new_sequence("a", A, 4))
        first, ahead = scheduled(r), prepared(r)
        with pytest.raises(PlanMismatch):
            r.scheduler.update(first, (None,))
        assert (seq.num_computed, seq.num_tokens) == (0, len(A))
        drawn = r.runner.execute(first)
        land(r, first, drawn)
        second = resolve(ahead, first, drawn)
        land(r, second, r.runner.execute(second))
        assert r.answers["a"] == expected(A, 2)


class Pipeline:
    """Steps as the engine's two threads take them, in an order that `rng` draws: the thread may be one step ahead."""

    def __init__(self, r: Rig, rng: random.Random, *, overlapped: bool) -> None:
        self.r, self.rng, self.overlapped = r, rng, overlapped
        self.num_ahead = 0
        self.flights: list[StepPlan] = []  # at most two
        self.done: list[tuple[StepPlan, Drawn]] = []  # executed, not taken in
        self.last: tuple[StepPlan, Drawn] | None = None  # executed last: what the next one is resolved with

    def tick(self) -> bool:
        """False if nothing could be done."""
        if not self.flights:
            plan = self.r.scheduler.schedule()
            if plan is None:
                return False
            self.flights.append(plan)
        if self.overlapped and (ahead := self.r.scheduler.prepare()) is not None:
            self.flights.append(ahead)
            self.num_ahead += 1
        return True

    def finish(self) -> None:
        self.execute()
        if len(self.flights) > 1 and self.rng.random() < 0.5:
            self.execute()  # the thread goes on before the loop takes the first one in
        plan, drawn = self.done.pop(0)
        self.flights.pop(0)
        land(self.r, plan, drawn)

    def execute(self) -> None:
        if len(self.done) == len(self.flights):
            return
        plan = self.flights[len(self.done)]
        if self.last is not None:
            plan = resolve(plan, *self.last)  # changes nothing where the plan was not made ahead
        self.last = (plan, self.r.runner.execute(plan))
        self.done.append(self.last)

    def fail(self) -> None:
        """The step in front raises after it has written: everything that is out is taken back."""
        if not self.done:
            self.execute()
            for plan in reversed(self.flights):
                self.r.scheduler.discard(plan)
            self.flights, self.done, self.last = [], [], None


def storm(seed: int, *, overlapped: bool) -> tuple[dict[str, list[int]], dict[str, Sequence], int]:
    """Answers by request, those that were aborted, and how many plans were made ahead; blocks are all back."""
    shape, traffic = random.Random(seed), random.Random(seed + 1)
    sizes = {"max_rows": shape.choice([2, 5, 32]), "max_step_tokens": shape.choice([7, 16, 64])}
    num_blocks = shape.choice([16, 24, 60])
    aborted: dict[str, Sequence] = {}
    with rig(num_blocks, 4, model=MODEL, **sizes) as r:
        pipeline = Pipeline(r, random.Random(seed + 2), overlapped=overlapped)
        for number in range(30):
            prompt = [traffic.randrange(3) for _ in range(traffic.randrange(1, 40))]
            limit = traffic.randrange(1, 20)
            stop = (expected(prompt, limit, MODEL)[-1],) if traffic.random() < 0.3 else ()
            r.add(new_sequence(str(number), prompt, limit, stop=stop))
            steps, victim, fails = traffic.randrange(6), traffic.randrange(number + 1), traffic.random() < 0.1
            for _ in range(steps):
                if pipeline.tick():
                    pipeline.finish()
            if fails and pipeline.tick():
                pipeline.fail()
            if traffic.random() < 0.2:
                pipeline.tick()  # the abort meets one plan or two
                seq = r.scheduler.remove(str(victim))
                if seq is not None:
                    aborted[str(victim)] = seq
            assert r.kv.free + r.kv.cached + r.kv.used == r.kv.total
        for _ in range(10_000):
            if not pipeline.tick():
                break
            pipeline.finish()
        r.assert_idle()
        return r.answers, aborted, pipeline.num_ahead


@pytest.mark.parametrize("run", range(30))
def test_a_scheduler_that_plans_ahead_gives_the_tokens_of_one_that_does_not(run: int) -> None:
    seed = BASE_SEED + run
    print(f"BATON_TEST_SEED={seed} run 0")
    answers, aborted, num_ahead = storm(seed, overlapped=True)
    reference, reference_aborted, none_ahead = storm(seed, overlapped=False)
    assert num_ahead > 0 and none_ahead == 0
    unharmed = reference.keys() - aborted.keys() - reference_aborted.keys()
    assert {name: answers[name] for name in unharmed} == {name: reference[name] for name in unharmed}
    for name in answers.keys() & reference.keys():
        shorter, longer = sorted((answers[name], reference[name]), key=len)
        assert longer[: len(shorter)] == shorter
