"""The runner: plans in, tokens out in the order of the rows, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from libs.engine.kv.layout import KvLayout
from libs.engine.kv.pool import KvPool
from libs.engine.model.passes import MAX_TOKENS, split_rows
from libs.engine.model.weights import load_weights
from libs.engine.plan import Draw, Row, StepAbandoned, StepPlan
from libs.engine.sampler import LogitsError
from libs.wire.messages import Sampling
from tests.checkpoints import tiny_model
from tests.integration.model_steps import Bench, MakeRunner, Source, native_runner, random_tokens, same_bits

MakeBench = Callable[..., Bench]

SOURCE = Source(tiny_model("llama", context_length=4096))
GREEDY = Sampling(temperature=0.0)


def row(name: str, tokens: list[int], start: int, blocks: list[int], *, draws: bool = True) -> Row:
    history = [0] * start + tokens
    draw = Draw(GREEDY, history, len(history)) if draws else None
    return Row(name, tuple(tokens), start, tuple(blocks), draw)


def test_tokens_come_in_the_order_of_the_rows(make_bench: MakeBench, make_runner: MakeRunner) -> None:
    """Whatever order the batch puts them in: long and short rows, with and without a draw."""
    bench, rng = make_bench(SOURCE, 60, make_runner=make_runner), random.Random(0)
    feeds = [bench.feed(random_tokens(rng, n, 320)) for n in (40, 1, 17, 1, 90, 40)]
    rows = [row(str(i), feed.tokens, 0, feed.blocks, draws=i != 2) for i, feed in enumerate(feeds)]
    together = bench.runner.execute(StepPlan(tuple(rows)))
    alone = [bench.runner.execute(StepPlan((one,)))[0] for one in rows]
    assert together == tuple(alone)
    assert [token is None for token in together] == [False, False, True, False, False, False]
    assert len({token.id for token in together if token}) > 1


def test_a_step_larger_than_one_pass(make_bench: MakeBench, make_runner: MakeRunner) -> None:
    bench, rng = make_bench(SOURCE, 200, make_runner=make_runner), random.Random(1)
    tokens = random_tokens(rng, 1300, 320)
    feed, small = bench.feed(tokens), bench.feed(random_tokens(rng, 5, 320))
    whole = bench.step((small, 5), (feed, 1300))[1]
    again = bench.feed(tokens)
    expected = bench.run(again, [500] * 3)
    assert whole is not None
    assert same_bits(whole, expected)
    assert bench.kv(feed) == bench.kv(again)


def test_an_abandoned_step_ends_before_its_next_layer(make_bench: MakeBench, make_runner: MakeRunner) -> None:
    bench = make_bench(SOURCE, 4, make_runner=make_runner)
    feed = bench.feed([5, 6, 7])
    plan = StepPlan((row("a", feed.tokens, 0, feed.blocks),))
    asked = 0

    def after_one_layer() -> bool:
        nonlocal asked
        asked += 1
        return asked > 1

    with pytest.raises(StepAbandoned):
        bench.runner.execute(plan, after_one_layer)
    assert asked == 2
    again = bench.feed([5, 6, 7])
    assert bench.runner.execute(plan) == bench.runner.execute(
        StepPlan((row("a", again.tokens, 0, again.blocks),))
    )


def test_nothing_to_do(make_bench: MakeBench, make_runner: MakeRunner) -> None:
    assert make_bench(SOURCE, 1, make_runner=make_runner).runner.execute(StepPlan(())) == ()


def test_it_runs_on_another_thread(make_bench: MakeBench, make_runner: MakeRunner) -> None:
    bench = make_bench(SOURCE, 4, make_runner=make_runner)
    feed = bench.feed([5, 6, 7])
    plan = StepPlan((row("a", feed.tokens, 0, feed.blocks),))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(bench.runner.execute, plan).result(timeout=60) == bench.runner.execute(plan)


def test_it_sees_what_others_write_into_the_pool(make_bench: MakeBench, make_runner: MakeRunner) -> None:
    """Pulled blocks arrive as bytes behind the tensor's back."""
    bench = make_bench(SOURCE, 4, make_runner=make_runner)
    feed = bench.feed(list(range(17)))
    expected = bench.run(feed, [17])
    moved = bench.feed(list(range(17)))
    bench.pool.blocks(moved.blocks[0], 1)[:] = bench.pool.blocks(feed.blocks[0], 1)
    moved.done = 16
    assert same_bits(bench.run(moved, [1]), expected)


def test_damaged_kv_is_an_error_not_a_token(make_bench: MakeBench, make_runner: MakeRunner) -> None:
    """The bench's pool holds NaN where nothing was computed."""
    bench = make_bench(SOURCE, 4, make_runner=make_runner)
    feed = bench.feed(list(range(17)))
    with pytest.raises(LogitsError):
        bench.runner.execute(StepPlan((row("a", [16], 16, feed.blocks),)))


def test_a_row_without_room_for_its_tokens_is_refused(make_bench: MakeBench, make_runner: MakeRunner) -> None:
    runner = make_bench(SOURCE, 4, make_runner=make_runner).runner
    with pytest.raises(ValueError, match="row short: 1 blocks for 17 tokens"):
        runner.execute(StepPlan((row("short", list(range(17)), 0, [0]),)))


@pytest.mark.parametrize(
    ("token", "start", "block", "what"),
    [
        (320, 0, 0, "token"),
        (-1, 0, 0, "token"),
        (5, 0, 4, "block"),
        (5, 0, -1, "block"),
        (5, 64, 0, "position"),
    ],
)
def test_the_native_engine_reads_nothing_outside(
    make_bench: MakeBench, token: int, start: int, block: int, what: str
) -> None:
    """Its kernels check no index; a pool of 4 blocks bounds positions to 64."""
    runner = make_bench(SOURCE, 4, make_runner=native_runner).runner
    with pytest.raises(ValueError, match=f"a {what} is outside"):
        runner.execute(StepPlan((row("r", [token], start, [block] * 5),)))


@pytest.mark.parametrize(
    "layout", [KvLayout(3, 2, 16), KvLayout(2, 4, 16), KvLayout(2, 2, 32)], ids=["layers", "heads", "dim"]
)
def test_a_pool_of_another_model_is_refused(make_runner: MakeRunner, layout: KvLayout) -> None:
    pool = KvPool(layout, 1)
    with pytest.raises(ValueError, match="cannot hold"):
        make_runner(SOURCE, pool)
    pool.close()


def test_numerics_tell_how_products_are_computed(make_bench: MakeBench) -> None:
    runner = make_bench(SOURCE, 1).runner
    assert runner.numerics.startswith(f"torch-{torch.__version__}/")
    assert runner.numerics.endswith(f"/{runner.matmul.name}")


def test_loading_reports_its_progress_and_shares_a_tied_head() -> None:
    seen: list[tuple[int, int]] = []
    tied = Source(tiny_model("qwen2", num_layers=3, tied_head=True))
    weights = load_weights(tied, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert weights.head is weights.embed
    assert weights.layers[0].qkv_bias is not None


@pytest.mark.parametrize("seed", range(5))
def test_split_rows(seed: int) -> None:
    """Passes keep to their limit and are full but for the last; rows stay whole and in order."""
    rng = random.Random(seed)
    lengths = [rng.choice([1, 1, 3, rng.randint(1, 1500)]) for _ in range(30)]
    rows = [row(str(i), list(range(n)), 7, [], draws=i % 3 > 0) for i, n in enumerate(lengths)]
    passes = list(split_rows(rows))
    sizes = [sum(len(part.tokens) for part in one) for one in passes]
    assert sizes[:-1] == [MAX_TOKENS] * (len(sizes) - 1)
    assert 0 < sizes[-1] <= MAX_TOKENS
    for original in rows:
        parts = [part for one in passes for part in one if part.request_id == original.request_id]
        assert sum((part.tokens for part in parts), ()) == original.tokens
        assert [part.start for part in parts[1:]] == [part.end for part in parts[:-1]]
        assert parts[0].start == original.start
        assert all(part.draw is None for part in parts[:-1])
        assert parts[-1].draw is original.draw
