"""The plans that the benchmark makes, seen by a runner that answers from the KV that it reads back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from libs.bench.driver import Driver, blocks_needed
from libs.bench.shapes import FULL, QUICK, Cached, Decode, Prefill, Shapes
from libs.engine.fake import FAKE_LAYOUT, FakeRunner
from libs.engine.kv.pool import KvPool
from libs.engine.plan import StepPlan, never
from libs.wire.messages import Token

LONGEST, STREAMS, STREAM_TOKENS = 100, 3, 40


class Recorder:
    """A runner that keeps its plans. Each step takes a second of `clock`."""

    def __init__(self, pool: KvPool) -> None:
        self.plans: list[StepPlan] = []
        self._runner = FakeRunner(pool)

    def execute(self, plan: StepPlan, is_abandoned: Callable[[], bool] = never) -> tuple[Token | None, ...]:
        self.plans.append(plan)
        return self._runner.execute(plan, is_abandoned)

    def clock(self) -> float:
        return float(len(self.plans))


@pytest.fixture
def pool() -> Iterator[KvPool]:
    pool = KvPool(FAKE_LAYOUT, blocks_needed(FAKE_LAYOUT, LONGEST, STREAMS, STREAM_TOKENS))
    yield pool
    pool.close()


@pytest.fixture
def recorder(pool: KvPool) -> Recorder:
    return Recorder(pool)


@pytest.fixture
def driver(pool: KvPool, recorder: Recorder) -> Driver:
    return Driver(
        recorder,
        pool,
        vocab_size=1000,
        max_step_tokens=32,
        longest=LONGEST,
        num_streams=STREAMS,
        stream_tokens=STREAM_TOKENS,
        clock=recorder.clock,
    )


def test_a_prompt_goes_in_chunks_and_only_the_last_draws(driver: Driver, recorder: Recorder) -> None:
    assert driver.prefill(Prefill(70)) == 3.0
    rows = [plan.rows[0] for plan in recorder.plans]
    assert [(row.start, row.end) for row in rows] == [(0, 32), (32, 64), (64, 70)]
    assert [row.draw is not None for row in rows] == [False, False, True]
    assert all(len(row.blocks) * FAKE_LAYOUT.block_size >= row.end for row in rows)


def test_streams_have_blocks_of_their_own_with_the_kv_of_the_context(
    driver: Driver, recorder: Recorder, pool: KvPool
) -> None:
    driver.prefill(Prefill(32))
    before = len(recorder.plans)
    assert driver.decode(Decode(STREAMS, 32), 4) == 4.0
    steps = recorder.plans[before:]
    assert [[row.start for row in plan.rows] for plan in steps] == [[32 + i] * STREAMS for i in range(4)]
    tables = [set(row.blocks) for row in steps[-1].rows]
    assert sum(map(len, tables)) == len(set.union(*tables))
    contexts = {b"".join(pool.blocks(block, 1) for block in row.blocks[:2]) for row in steps[-1].rows}
    assert len(contexts) == 1
    assert contexts != {bytes(2 * FAKE_LAYOUT.block_bytes)}


def test_filling_the_context_is_not_timed_and_done_once(driver: Driver, recorder: Recorder) -> None:
    assert driver.cached(Cached(64, 8)) == 1.0
    filled = len(recorder.plans)
    row = recorder.plans[-1].rows[0]
    assert (filled, row.start, len(row.tokens), row.draw is not None) == (3, 64, 8, True)
    assert driver.cached(Cached(64, 8)) == 1.0
    assert len(recorder.plans) == filled + 1


def test_shapes_up_to_the_last_token_fit(driver: Driver) -> None:
    driver.warm_up()
    driver.prefill(Prefill(LONGEST))
    driver.decode(Decode(STREAMS, STREAM_TOKENS - 4), 4)
    driver.cached(Cached(LONGEST - 16, 16))


def test_a_pool_that_is_too_small_is_refused(pool: KvPool, recorder: Recorder) -> None:
    with pytest.raises(ValueError, match="blocks are needed"):
        Driver(recorder, pool, vocab_size=9, max_step_tokens=8, longest=LONGEST + 16, num_streams=STREAMS,
               stream_tokens=STREAM_TOKENS)  # fmt: skip


def test_shapes_say_how_much_room_they_need() -> None:
    assert FULL.longest == 4096 + FULL.decode_steps
    assert (FULL.num_streams, FULL.stream_tokens) == (32, 1024 + FULL.decode_steps)
    only = FULL.only(frozenset({"cached"}))
    assert (only.all, only.longest, only.num_streams) == (FULL.cached, 4016, 1)


def test_shapes_beyond_the_context_are_left_out() -> None:
    fitting = FULL.fitting(1050)
    assert [shape.num_tokens for shape in fitting.prefills] == [512, 1024]
    assert [shape.context for shape in fitting.decodes] == [32]
    assert fitting.cached == ()
    assert isinstance(fitting, Shapes)


def test_a_quick_figure_is_never_taken_for_a_full_one() -> None:
    assert not {shape.key for shape in QUICK.all} & {shape.key for shape in FULL.all}
