"""Lives of sequences in a scheduler, step by step, without a model."""

from __future__ import annotations

import time

import pytest

from libs.engine.fake import FakeModel
from libs.engine.kv.names import child_name
from libs.engine.scheduler import SchedulerConfig
from libs.engine.sequence import Sequence, Status
from libs.engine.step import PlanMismatch
from libs.wire.errors import Code, RequestRefused
from libs.wire.messages import Token
from tests.lifecycle.engine_rig import drawn_for, expected, new_sequence, rig

A, B, C = [1] * 10, [2] * 10, [3] * 10


# ---------------------------------------------------------------- one sequence


def test_the_life_of_a_sequence() -> None:
    with rig(16) as r:
        # 1. It arrives and waits; nothing is taken yet.
        seq = r.add(new_sequence("a", A, max_tokens=3))
        assert (seq.status, r.scheduler.num_waiting, r.kv.used) == (Status.WAITING, 1, 0)
        # 2. Its prompt is planned whole, with a draw at its end.
        assert r.schedule() == [("a", 0, 10)]
        assert (seq.status, r.scheduler.num_running, r.kv.used) == (Status.RUNNING, 1, 3)
        assert r.plan is not None and r.plan.rows[0].draw is not None
        # 3. The step names its full blocks and brings the first token.
        (event,) = r.finish()
        assert (event.num_computed, len(event.tokens), event.reason) == (10, 1, None)
        assert (seq.num_computed, seq.num_tokens, len(seq.names)) == (10, 11, 2)
        # 4. Each further step computes one token and draws one.
        assert r.step() == [("a", 10, 11)]
        assert r.schedule() == [("a", 11, 12)]
        # 5. The last one ends it; its named blocks stay cached.
        (event,) = r.finish()
        assert (event.reason, event.is_last, seq.status) == ("length", True, Status.FINISHED)
        assert r.answers["a"] == expected(A, 3)
        # 6. The scheduler is empty.
        assert r.schedule() == []
        r.assert_idle()
        assert r.kv.cached == 3


def test_one_token_asked_for_is_one_token() -> None:
    with rig(16) as r:
        r.add(new_sequence("a", A, max_tokens=1))
        assert r.run() == 1
        assert (r.answers["a"], r.reasons["a"]) == (expected(A, 1), "length")
        r.assert_idle()


@pytest.mark.parametrize("script", [[2], [9, 9, 2]])
def test_a_stop_token_ends_at_once(script: list[int]) -> None:
    with rig(16, model=FakeModel(script={tuple(A): script})) as r:
        r.add(new_sequence("a", A, max_tokens=50, stop=(2,)))
        assert r.run() == len(script)
        assert (r.answers["a"], r.reasons["a"]) == (script, "stop")
        r.assert_idle()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 63])
@pytest.mark.parametrize("max_chunk", [1, 3, 4, 7, 64])
def test_chunks_may_end_anywhere(length: int, max_chunk: int) -> None:
    prompt = list(range(length))
    with rig(32, max_chunk=max_chunk) as r:
        r.add(new_sequence("a", prompt, max_tokens=5))
        steps = r.run()
        assert steps == -(-length // max_chunk) + 4
        assert r.answers["a"] == expected(prompt, 5)


def test_the_same_prompt_again_is_taken_from_the_cache() -> None:
    prompt = list(range(32))
    with rig(16, block_size=16) as r:
        first = r.add(new_sequence("a", prompt, max_tokens=4))
        r.run()
        second = r.add(new_sequence("b", prompt, max_tokens=4))
        assert r.step() == [("b", 31, 32)]
        r.run()
        assert (first.num_cached, second.num_cached) == (0, 31)
        assert r.answers["a"] == r.answers["b"] == expected(prompt, 4)


def test_evicted_prompts_answer_as_when_cold() -> None:
    prompts = [[letter] * 30 for letter in range(8)]
    with rig(8) as r:
        for turn, prompt in enumerate([*prompts, prompts[0]]):
            seq = r.add(new_sequence(str(turn), prompt, max_tokens=2))
            r.run()
            assert seq.num_cached == 0
        assert r.answers["0"] == r.answers["8"] == expected(prompts[0], 2)
        r.assert_idle()


def test_kv_that_a_sequence_brings_along_is_kept() -> None:
    with rig(16) as r:
        # 1. Another engine computed prompt and first token; the blocks were pulled.
        donor = r.add(new_sequence("donor", A, max_tokens=2))
        r.schedule()
        r.finish()
        seq = new_sequence("a", A, max_tokens=3)
        seq.append(donor.tokens[-1])
        assert r.scheduler.reserve(seq)
        for mine, theirs in zip(seq.blocks, donor.blocks, strict=False):
            r.pool.blocks(mine, 1)[:] = r.pool.blocks(theirs, 1)
        seq.num_computed, seq.num_cached = 10, 8
        r.kv.commit(seq)
        blocks = list(seq.blocks)
        r.scheduler.remove("donor")
        # 2. One token is left to compute: it decodes from its first step on.
        r.add(seq)
        assert r.step() == [("a", 10, 11)]
        assert (seq.blocks[: len(blocks)], seq.num_cached) == (blocks, 8)
        r.run()
        assert r.answers["a"] == expected(A, 3)[1:]
        r.assert_idle()


# ---------------------------------------------------------------- many sequences


def test_decodes_come_first_then_prompts_in_order() -> None:
    with rig(64, max_step_tokens=16, max_rows=4) as r:
        # 1. `a` is decoding.
        r.add(new_sequence("a", [1] * 4, max_tokens=20))
        r.step()
        # 2. Two prompts arrive; the first takes what is left of the step, the second what is left then.
        r.add(new_sequence("b", [2] * 20, max_tokens=20))
        r.add(new_sequence("c", [3] * 20, max_tokens=20))
        assert r.step() == [("a", 4, 5), ("b", 0, 15)]
        assert r.step() == [("a", 5, 6), ("b", 15, 20), ("c", 0, 10)]
        assert r.step() == [("a", 6, 7), ("b", 20, 21), ("c", 10, 20)]
        assert r.step() == [("a", 7, 8), ("b", 21, 22), ("c", 20, 21)]


def test_a_ready_sequence_need_not_wait_for_a_long_prompt() -> None:
    with rig(64, max_step_tokens=8) as r:
        r.add(new_sequence("a", list(range(40)), max_tokens=2))
        r.step()
        seq = new_sequence("b", [2], max_tokens=2)
        r.add(seq)
        assert r.step() == [("b", 0, 1), ("a", 8, 15)]


@pytest.mark.parametrize("max_step_tokens", [2, 3, 5, 8, 33])
def test_decodes_leave_a_quarter_of_a_step_to_prompts(max_step_tokens: int) -> None:
    with rig(700, max_step_tokens=max_step_tokens, max_rows=32) as r:
        for number in range(r.scheduler.config.max_running - 1):
            r.add(new_sequence(f"d{number}", [number], max_tokens=60))
        r.step()
        prompt = list(range(50))
        seq = r.add(new_sequence("p", prompt, max_tokens=1))
        for number in range(10):
            r.add(new_sequence(f"later{number}", [number], max_tokens=2))
        while seq.status is not Status.FINISHED:
            missing = seq.num_uncomputed
            for request_id, start, end in r.step():
                if request_id == "p":
                    assert end - start >= min(missing, max(1, max_step_tokens // 4))
            assert seq.status is not Status.RUNNING or seq.num_uncomputed < missing
        r.run()
        assert r.answers["p"] == expected(prompt, 1)
        assert len(r.reasons) == r.scheduler.config.max_running + 10


def test_rows_are_never_more_than_max_rows() -> None:
    with rig(64, max_rows=3) as r:
        for number in range(8):
            r.add(new_sequence(str(number), [number] * 3, max_tokens=4))
        assert [row[0] for row in r.schedule()] == ["0", "1", "2"]
        r.finish()
        assert (r.scheduler.num_running, r.scheduler.num_waiting) == (3, 5)
        r.run()
        assert len(r.reasons) == 8


# ---------------------------------------------------------------- blocks run short


def test_the_newest_gives_way_and_its_tokens_are_not_sent_twice() -> None:
    with rig(7) as r:
        # 1. Both fit at first: 3 blocks each.
        r.add(new_sequence("a", A, max_tokens=9))
        r.add(new_sequence("b", B, max_tokens=9))
        assert [row[0] for row in r.step()] == ["a", "b"]
        r.step()
        r.step()
        # 2. `a` takes the last block, `b` finds none and waits, keeping its KV.
        assert r.step() == [("a", 12, 13)]
        assert (r.scheduler.num_running, r.scheduler.num_preemptions) == (2, 0)
        # 3. `a` needs another one: `b` gives all of its own up and goes back to waiting.
        while r.scheduler.num_preemptions == 0:
            assert [row[0] for row in r.step()] == ["a"]
        assert (r.scheduler.num_running, r.scheduler.num_waiting) == (1, 1)
        # 4. Once `a` is done `b` goes on where it was.
        r.run()
        assert r.answers == {"a": expected(A, 9), "b": expected(B, 9)}
        r.assert_idle()


def test_a_preempted_sequence_is_the_first_to_return() -> None:
    with rig(7, max_rows=2) as r:
        r.add(new_sequence("a", A, max_tokens=9))
        r.add(new_sequence("b", B, max_tokens=9))
        r.add(new_sequence("c", C, max_tokens=9))
        while r.scheduler.num_preemptions == 0:
            r.step()
        ends: list[str] = []
        while r.schedule():
            ends += [event.seq.request_id for event in r.finish() if event.is_last]
        assert ends == ["a", "b", "c"]


def test_who_was_refused_blocks_is_admitted_as_soon_as_there_are_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[tuple[int, ...]] = []

    def counted(parent: bytes, tokens: tuple[int, ...]) -> bytes:
        hashed.append(tokens)
        return child_name(parent, tokens)

    monkeypatch.setattr("libs.engine.kv.cache.child_name", counted)
    with rig(10) as r:
        # 1. `b` needs 4 blocks and 2 to spare; 5 are left.
        r.add(new_sequence("short", [1] * 3, max_tokens=4))
        r.add(new_sequence("a", [2] * 13, max_tokens=40))
        r.add(new_sequence("b", [3] * 16, max_tokens=2))
        r.step()
        # 2. While nothing becomes free its prompt is not hashed again.
        hashed.clear()
        r.step()
        r.step()
        assert (r.scheduler.num_waiting, (3, 3, 3, 3) in hashed) == (1, False)
        # 3. `short` ends, and `b` joins `a` at once.
        r.step()
        assert [row[0] for row in r.schedule()] == ["a", "b"]


def test_what_a_preempted_sequence_finds_again_is_not_a_cache_hit_of_its_user() -> None:
    with rig(7) as r:
        r.add(new_sequence("a", A, max_tokens=9))
        seq = r.add(new_sequence("b", B, max_tokens=9))
        r.run()
        assert r.scheduler.num_preemptions == 1
        assert seq.num_cached == 0


def test_admission_leaves_blocks_for_those_who_run() -> None:
    with rig(8) as r:
        r.add(new_sequence("a", [1] * 16, max_tokens=8))
        r.add(new_sequence("b", [2] * 16, max_tokens=8))
        # 4 + 4 blocks would fit, with none left for `a` to grow into.
        assert r.step() == [("a", 0, 16)]
        assert r.scheduler.num_waiting == 1
        r.run()
        assert (r.scheduler.num_preemptions, len(r.reasons)) == (0, 2)


def test_a_sequence_that_outgrows_the_pool_ends_by_length() -> None:
    with rig(4) as r:
        r.add(new_sequence("a", A, max_tokens=1000))
        r.add(new_sequence("b", B, max_tokens=1000))
        r.run()
        # 16 tokens have room; the 17th is drawn from them and ends the answer.
        assert r.answers == {"a": expected(A, 7), "b": expected(B, 7)}
        assert set(r.reasons.values()) == {"length"}
        r.assert_idle()


def test_a_prompt_that_fills_the_pool_gets_one_token() -> None:
    with rig(4) as r:
        r.add(new_sequence("a", [1] * 16, max_tokens=5))
        r.run()
        assert (r.answers["a"], r.reasons["a"]) == (expected([1] * 16, 1), "length")


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    with rig(4) as r:
        with pytest.raises(RequestRefused) as caught:
            r.add(new_sequence("a", [1] * 17, max_tokens=1))
        assert (caught.value.code, caught.value.retryable) == (Code.CAPACITY_EXCEEDED, False)
        assert "17 tokens" in caught.value.message and "16 tokens" in caught.value.message
        r.assert_idle()


def test_blocks_held_elsewhere_are_waited_for_without_preempting_the_last_one() -> None:
    with rig(4) as r:
        r.add(new_sequence("a", [1] * 4, max_tokens=12))
        r.step()
        # 1. A lease pins the rest of the pool.
        held = new_sequence("held", [9] * 12, max_tokens=1)
        assert r.kv.grow(held, 8)
        while r.step():
            pass
        # 2. The sequence waits with its KV; new ones wait behind it.
        r.add(new_sequence("b", B, max_tokens=1))
        assert r.schedule() == []
        assert (r.scheduler.num_running, r.scheduler.num_waiting, r.scheduler.num_preemptions) == (1, 1, 0)
        # 3. The lease ends; both finish.
        r.kv.release(held)
        r.run()
        assert r.answers == {"a": expected([1] * 4, 12), "b": expected(B, 1)}
        r.assert_idle()


def test_pulled_kv_that_waits_gives_way_to_those_who_run() -> None:
    with rig(6, max_rows=1) as r:
        r.add(new_sequence("a", [1] * 4, max_tokens=17))
        r.step()
        # 1. Two sequences were pulled and wait for a row.
        for name in ("b", "c"):
            seq = new_sequence(name, [ord(name)] * 7, max_tokens=2)
            assert r.kv.reserve(seq)
            seq.num_computed = 0
            r.add(seq)
        # 2. `a` outgrows what is left: the newest loses its KV first, and computes it later.
        r.run()
        assert r.answers["a"] == expected([1] * 4, 17)
        assert [r.answers[name] for name in ("b", "c")] == [expected([ord(n)] * 7, 2) for n in ("b", "c")]
        r.assert_idle()


def test_waiting_sequences_never_block_each_other_for_ever() -> None:
    with rig(6) as r:
        # 1. `small` holds pulled KV in 4 of 6 blocks and is behind `big`, which needs 5.
        r.add(new_sequence("big", [1] * 20, max_tokens=1))
        small = new_sequence("small", [2] * 16, max_tokens=1)
        assert r.kv.reserve(small)
        r.add(small)
        # 2. Nothing runs, so the newer one gives way.
        r.run()
        assert r.answers == {"big": expected([1] * 20, 1), "small": expected([2] * 16, 1)}


def test_reserving_for_a_pull_leaves_what_the_queue_needs() -> None:
    with rig(10, max_rows=1) as r:
        r.add(new_sequence("a", [1] * 8, max_tokens=2))
        r.step()
        r.add(new_sequence("b", [2] * 16, max_tokens=2))  # waits for the row, needs 4
        pulled = new_sequence("p", [3] * 16, max_tokens=2)
        calls: list[None] = []
        r.kv.on_free(lambda: calls.append(None))
        assert not r.scheduler.reserve(pulled)  # 8 available, 4 for b, 1 for a to grow into
        assert (pulled.blocks, calls) == ([], [])
        r.scheduler.remove("b")
        assert len(calls) == 1  # told, although `b` held no block
        assert r.scheduler.reserve(pulled)
        assert len(pulled.blocks) == 4


# ---------------------------------------------------------------- refusals, aborts, deadlines, failures


def test_exactly_those_beyond_rows_and_queue_are_refused() -> None:
    config = SchedulerConfig(max_rows=3, max_queue=5)
    with rig(64, max_rows=3, max_queue=5) as r:
        refused: list[RequestRefused] = []
        for number in range(3 + 5 + 4):
            try:
                r.add(new_sequence(str(number), [number] * 4, max_tokens=3))
            except RequestRefused as error:
                refused.append(error)
        assert len(refused) == 4
        assert {(e.code, e.retryable, e.retry_after_s) for e in refused} == {
            (Code.OVERLOADED, True, config.retry_after_s)
        }
        # A waiter that is cancelled makes room for exactly one.
        r.scheduler.remove("7")
        r.add(new_sequence("x", [1] * 4, max_tokens=3))
        with pytest.raises(RequestRefused):
            r.add(new_sequence("y", [1] * 4, max_tokens=3))
        r.run()
        assert len(r.reasons) == 8
        r.assert_idle()


def test_sequences_that_are_accepted_but_not_added_count() -> None:
    with rig(64, max_rows=2, max_queue=2) as r:
        r.add(new_sequence("a", A, max_tokens=1))
        r.scheduler.check(10, num_held=2)
        with pytest.raises(RequestRefused) as caught:
            r.scheduler.check(10, num_held=3)
        assert caught.value.code is Code.OVERLOADED


def test_an_id_is_here_once() -> None:
    with rig(16) as r:
        r.add(new_sequence("a", A, max_tokens=3))
        with pytest.raises(ValueError, match="already"):
            r.add(new_sequence("a", A, max_tokens=3))
        r.step()
        with pytest.raises(ValueError, match="already"):
            r.add(new_sequence("a", A, max_tokens=3))


def test_a_sequence_with_nothing_to_do_is_not_taken() -> None:
    with rig(16) as r:
        done = new_sequence("a", A, max_tokens=1)
        done.append(7)
        with pytest.raises(ValueError, match="nothing to do"):
            r.add(done)  # its one token came from prefill: decoding would send a second
        computed = new_sequence("b", A, max_tokens=1)
        computed.num_computed = 10
        with pytest.raises(ValueError, match="nothing to do"):
            r.add(computed)


@pytest.mark.parametrize("when", ["waiting", "between steps", "prefill in flight", "decode in flight"])
def test_an_abort_frees_the_blocks(when: str) -> None:
    with rig(16, max_chunk=6) as r:
        seq = r.add(new_sequence("a", A, max_tokens=5))
        steps = {"waiting": 0, "between steps": 1, "prefill in flight": 0, "decode in flight": 3}[when]
        for _ in range(steps):
            r.step()
        sent = len(r.answers.get("a", []))
        if "flight" in when:
            r.schedule()
            blocks = list(seq.blocks)
            assert r.scheduler.remove("a") is seq
            assert (r.kv.used, seq.blocks) == (len(blocks), blocks)  # the step still writes there
            assert r.finish() == []
        else:
            assert r.scheduler.remove("a") is seq
        assert r.scheduler.remove("a") is None
        assert len(r.answers.get("a", [])) == sent
        assert r.schedule() == []
        r.assert_idle()


def test_the_same_id_may_come_back_while_its_aborted_step_runs() -> None:
    with rig(16) as r:
        r.add(new_sequence("a", A, max_tokens=5))
        r.schedule()
        r.scheduler.remove("a")
        r.add(new_sequence("a", B, max_tokens=2))
        assert r.finish() == []
        r.run()
        assert r.answers == {"a": expected(B, 2)}
        r.assert_idle()


def test_deadlines_end_waiting_running_and_executing_sequences() -> None:
    with rig(16, max_rows=2) as r:
        r.add(new_sequence("a", A, max_tokens=9, deadline_ns=200))
        r.add(new_sequence("b", B, max_tokens=2, deadline_ns=300))
        r.add(new_sequence("c", C, max_tokens=9, deadline_ns=100))
        assert r.scheduler.next_deadline_ns() == 100
        r.schedule()
        assert r.scheduler.expire(99) == []
        assert [seq.request_id for seq in r.scheduler.expire(200)] == ["a", "c"]
        assert [event.seq.request_id for event in r.finish()] == ["b"]
        r.run()
        assert r.answers == {"b": expected(B, 2)}
        assert r.scheduler.next_deadline_ns() is None
        r.assert_idle()


def test_a_discarded_plan_can_be_planned_again() -> None:
    with rig(16) as r:
        r.add(new_sequence("a", A, max_tokens=2))
        r.add(new_sequence("b", B, max_tokens=2))
        rows = r.schedule()
        assert r.plan is not None
        r.scheduler.remove("b")
        assert [seq.request_id for seq in r.scheduler.discard(r.plan)] == ["a"]
        assert r.schedule() == rows[:1]
        r.finish()
        r.run()
        assert r.answers == {"a": expected(A, 2)}
        r.assert_idle()


def test_results_that_do_not_fit_the_plan_change_nothing() -> None:
    with rig(16, max_chunk=6) as r:
        seq = r.add(new_sequence("a", A, max_tokens=2))
        r.schedule()
        plan = r.plan
        assert plan is not None
        for wrong in ((), (Token(id=1),), (None, None)):
            with pytest.raises(PlanMismatch):
                r.scheduler.update(plan, wrong)
        assert (seq.num_computed, seq.num_tokens) == (0, 10)
        r.scheduler.update(plan, drawn_for(plan))
        plan = r.scheduler.schedule()
        assert plan is not None
        with pytest.raises(PlanMismatch, match="no token"):
            r.scheduler.update(plan, (None,))


def test_one_plan_at_a_time() -> None:
    with rig(16) as r:
        r.add(new_sequence("a", A, max_tokens=2))
        r.schedule()
        with pytest.raises(RuntimeError, match="being executed"):
            r.scheduler.schedule()


def test_blocks_of_the_finished_stand_until_they_are_reaped() -> None:
    """A prefill worker pins them for its peer while it handles the event."""
    with rig(16) as r:
        r.add(new_sequence("a", A, max_tokens=1))
        plan = r.scheduler.schedule()
        assert plan is not None
        (event,) = r.scheduler.update(plan, r.runner.execute(plan))
        blocks = list(event.seq.blocks)
        assert (event.reason, len(blocks)) == ("length", 3)
        r.kv.ref(blocks)
        r.scheduler.reap()
        assert (r.kv.used, event.seq.blocks) == (3, [])
        r.kv.unref(blocks)
        r.assert_idle()


@pytest.mark.parametrize(
    "wrong", [{"max_rows": 0}, {"max_step_tokens": 1}, {"max_chunk": 0}, {"max_queue": 0}]
)
def test_sizes_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="sizes must be"):
        SchedulerConfig(**wrong)


def test_everybody_can_be_removed_at_once() -> None:
    with rig(16, max_rows=1) as r:
        sequences: list[Sequence] = [r.add(new_sequence(str(i), A, max_tokens=2)) for i in range(3)]
        r.step()
        assert r.scheduler.remove_all() == sequences
        r.assert_idle()


def test_planning_a_full_batch_costs_little_next_to_a_step() -> None:
    """It runs on the event loop: 32 rows of 8000 tokens, where a step takes 100 ms and more."""
    with rig(32 * 520, block_size=16, max_step_tokens=1 << 20) as r:
        for number in range(32):
            r.add(new_sequence(str(number), [number] * 8000, max_tokens=100))
        spent_s: list[float] = []
        for _ in range(32):
            started_s = time.perf_counter()
            plan = r.scheduler.schedule()
            assert plan is not None and len(plan.rows) == 32
            r.scheduler.update(plan, drawn_for(plan))
            spent_s.append(time.perf_counter() - started_s)
        print(f"schedule and update of 32 rows: median {sorted(spent_s)[16] * 1e3:.2f} ms")
        assert sorted(spent_s)[16] < 0.02  # 0.3 ms on a quiet core


def test_colliding_names_change_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libs.engine.kv.cache.child_name", lambda parent, tokens: b"x" * 32)
    prompts = [[1, 1, 1, 1, 2, 2, 2, 2, 3], [9, 9, 9, 9, 2, 2, 2, 2, 3], [1, 1, 1, 1, 5, 5, 5, 5, 3]]
    with rig(64) as r:
        for turn, prompt in enumerate(prompts * 2):
            r.add(new_sequence(str(turn), prompt, max_tokens=6))
            if turn % 2:
                r.run()
        for turn, prompt in enumerate(prompts * 2):
            assert r.answers[str(turn)] == expected(prompt, 6)
        r.assert_idle()
