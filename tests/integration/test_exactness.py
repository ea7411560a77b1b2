"""The bits of a row's logits and KV do not depend on how they were computed.

Each test computes a sequence alone, in one piece, and then in some other way, and compares bits.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from libs.checkpoint.open import open_checkpoint, resolve_model
from libs.engine.kv.layout import KvDtype
from libs.engine.kv.pool import KvPool
from libs.engine.model.packed import open_packed
from libs.engine.model.source import TensorSource
from libs.engine.native_runner import NativeRunner
from libs.kernels.matmul import NativeMatmul, TiledMatmul
from libs.kernels.native.kernels import Kernels
from tests.checkpoints import tiny_model
from tests.integration.model_steps import (
    MIXED_FORMATS,
    Bench,
    Feed,
    MakeRunner,
    Source,
    native_runner,
    random_tokens,
    same_bits,
    torch_runner,
)
from tests.native import CACHE_DIR, library

MakeBench = Callable[..., Bench]

# Around blocks of 16, tiles of 256 and passes of 512 tokens.
BOUNDARIES = (1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 271, 272, 273, 511, 512, 513, 600)
VARIANTS = {
    "llama": tiny_model("llama", context_length=2048),
    "mha": tiny_model("llama", context_length=2048, num_kv_heads=4, tied_head=True),
    "window": tiny_model("mistral", context_length=2048, sliding_window=50),
    "qwen2": tiny_model("qwen2", context_length=2048),
    "qwen3": tiny_model("qwen3", context_length=2048),
}


@pytest.fixture(params=list(VARIANTS))
def source(request: pytest.FixtureRequest) -> TensorSource:
    return Source(VARIANTS[request.param])


@pytest.fixture(params=["f16", "f32"])
def dtype(request: pytest.FixtureRequest) -> KvDtype:
    return request.param


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cold(bench: Bench, tokens: list[int]) -> tuple[Tensor, bytes]:
    """Logits and KV of a sequence alone, in one step. Its blocks are free again."""
    feed = bench.feed(tokens)
    logits = bench.run(feed, [len(tokens)])
    kv = bench.kv(feed)
    bench.release(feed)
    return logits, kv


def check(bench: Bench, feed: Feed, logits: Tensor, expected: tuple[Tensor, bytes], how: str) -> None:
    """Compare with `cold`, and free the blocks."""
    assert same_bits(logits, expected[0]), f"logits differ: {len(feed.tokens)} tokens, {how}"
    assert bench.kv(feed) == expected[1], f"KV differs: {len(feed.tokens)} tokens, {how}"
    bench.release(feed)


def test_chunked(
    make_bench: MakeBench, make_runner: MakeRunner, source: TensorSource, dtype: KvDtype
) -> None:
    bench, rng = make_bench(source, 60, dtype=dtype, make_runner=make_runner), random.Random(1)
    for length in BOUNDARIES:
        tokens = random_tokens(rng, length, bench.vocab_size)
        expected = cold(bench, tokens)
        schedules = [[rng.randint(1, 512) for _ in tokens], [rng.randint(1, 40) for _ in tokens]]
        if length in (33, 273):
            schedules.append([1] * length)  # as in decode
        for schedule in schedules:
            feed = bench.feed(tokens)
            check(bench, feed, bench.run(feed, schedule), expected, f"in chunks of {schedule[:20]}")


def test_among_neighbours(
    make_bench: MakeBench, make_runner: MakeRunner, source: TensorSource, dtype: KvDtype
) -> None:
    """Random neighbours at random points of their own, some in prefill, some in decode."""
    bench, rng = make_bench(source, 1300, dtype=dtype, make_runner=make_runner), random.Random(2)
    for num_neighbours in (1, 2, 3, 7, 16, 31):
        tokens = random_tokens(rng, rng.choice(BOUNDARIES), bench.vocab_size)
        expected = cold(bench, tokens)
        neighbours = [
            bench.feed(random_tokens(rng, rng.randint(1, 600), bench.vocab_size))
            for _ in range(num_neighbours)
        ]
        feed = bench.feed(tokens)
        logits = run_among(bench, rng, feed, neighbours)
        check(bench, feed, logits, expected, f"among {num_neighbours}")
        for neighbour in neighbours:
            bench.release(neighbour)


def run_among(bench: Bench, rng: random.Random, feed: Feed, neighbours: list[Feed]) -> Tensor:
    """Steps in which the sequence and some of its neighbours advance, until the sequence is complete."""
    while True:
        active = [feed, *(n for n in neighbours if n.left and rng.random() < 0.8)]
        rng.shuffle(active)
        parts = [(f, rng.choice([1, min(f.left, 2), rng.randint(1, f.left)])) for f in active]
        if feed.left < 4 or rng.random() < 0.2:  # get to an end
            parts = [(f, feed.left if f is feed else count) for f, count in parts]
        results = bench.step(*parts)
        logits = results[active.index(feed)]
        if logits is not None:
            return logits


def test_from_cached_prefix(
    make_bench: MakeBench, make_runner: MakeRunner, source: TensorSource, dtype: KvDtype
) -> None:
    """Blocks that another sequence computed, in a batch, serve as the prefix of a later one."""
    bench, rng = make_bench(source, 200, dtype=dtype, make_runner=make_runner), random.Random(3)
    prefix = random_tokens(rng, 320, bench.vocab_size)
    owner, other = bench.feed(prefix), bench.feed(random_tokens(rng, 70, bench.vocab_size))
    bench.step((owner, 100), (other, 70))
    bench.step((owner, 220))
    for cached, suffix in itertools.product((1, 15, 16, 17, 20), (1, 16, 200)):
        tokens = prefix[: cached * 16] + random_tokens(rng, suffix, bench.vocab_size)
        expected = cold(bench, tokens)
        feed = bench.feed(tokens, shared=owner.blocks[:cached])
        logits = bench.run(feed, [suffix])
        assert same_bits(logits, expected[0]), f"{cached} cached blocks and {suffix} tokens"
        assert bench.kv(feed) == expected[1]
        bench.release(feed, shared=cached)


@pytest.mark.parametrize("variant", ["llama", "window"])
def test_long_chunks(make_bench: MakeBench, make_runner: MakeRunner, variant: str) -> None:
    bench, rng = make_bench(Source(VARIANTS[variant]), 140, make_runner=make_runner), random.Random(10)
    tokens = random_tokens(rng, 2048, bench.vocab_size)
    expected = cold(bench, tokens)
    for schedule in ([2047, 1], [1, 2047], [1024] * 2, [300] * 7, [rng.randint(1, 90) for _ in tokens]):
        feed = bench.feed(tokens)
        check(bench, feed, bench.run(feed, schedule), expected, f"in chunks of {schedule[:20]}")


def test_on_two_threads(make_bench: MakeBench, source: TensorSource) -> None:
    bench, rng = make_bench(source, 100), random.Random(4)
    for length in (1, 17, 300, 520):
        tokens = random_tokens(rng, length, bench.vocab_size)
        expected = cold(bench, tokens)
        torch.set_num_threads(2)
        feed = bench.feed(tokens)
        check(bench, feed, bench.run(feed, [length]), expected, "on two threads")
        torch.set_num_threads(1)


@pytest.mark.parametrize("instruction_set", ["avx512vnni", "avx2", "portable"])
def test_on_every_instruction_set_and_number_of_threads(
    make_bench: MakeBench, source: TensorSource, instruction_set: str
) -> None:
    """The same bits as on the best instruction set of this machine, in whatever chunks."""
    best = make_bench(source, 30, make_runner=functools.partial(native_runner, formats=MIXED_FORMATS))
    tokens = random_tokens(random.Random(9), 300, best.vocab_size)
    expected = cold(best, tokens)
    for threads in (1, 2):
        make_runner = functools.partial(
            native_runner, formats=MIXED_FORMATS, instruction_set=instruction_set, threads=threads
        )
        other = make_bench(source, 30, make_runner=make_runner)
        for chunks in ([300], [37] * 9):
            feed = other.feed(tokens)
            check(other, feed, other.run(feed, chunks), expected, f"{instruction_set}, {threads} threads")


@pytest.mark.parametrize("block_size", [1, 8, 24, 32, 300])
def test_in_blocks_of_other_sizes(make_bench: MakeBench, make_runner: MakeRunner, block_size: int) -> None:
    source = Source(VARIANTS["llama"])
    bench = make_bench(source, 1800 // block_size + 8, block_size=block_size, make_runner=make_runner)
    rng = random.Random(5)
    for length in (23, 24, 25, 240, 300, 301, 512):
        tokens = random_tokens(rng, length, bench.vocab_size)
        expected = cold(bench, tokens)
        neighbour = bench.feed(random_tokens(rng, 200, bench.vocab_size))
        feed = bench.feed(tokens)
        check(bench, feed, run_among(bench, rng, feed, [neighbour]), expected, f"blocks of {block_size}")
        bench.release(neighbour)


def test_in_tiles_where_the_blas_cannot_be_trusted(make_bench: MakeBench) -> None:
    bench, rng = (
        make_bench(
            Source(VARIANTS["llama"]), 80, make_runner=functools.partial(torch_runner, matmul=TiledMatmul())
        ),
        random.Random(6),
    )
    for length in (1, 17, 257):
        tokens = random_tokens(rng, length, bench.vocab_size)
        expected = cold(bench, tokens)
        neighbour = bench.feed(random_tokens(rng, 100, bench.vocab_size))
        feed = bench.feed(tokens)
        check(bench, feed, run_among(bench, rng, feed, [neighbour]), expected, "in tiles")
        bench.release(neighbour)


class _UnevenMatmul(NativeMatmul):
    """Rounds many rows differently from few, as a free BLAS may."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(x) < 20:
            return super().linear(x, weight, bias)
        half = x.shape[1] // 2
        first = super().linear(x[:, :half].contiguous(), weight[:, :half].contiguous(), bias)
        return first + super().linear(x[:, half:].contiguous(), weight[:, half:].contiguous())


def test_these_tests_see_a_rounding_error(make_bench: MakeBench) -> None:
    bench, rng = (
        make_bench(
            Source(VARIANTS["llama"]), 20, make_runner=functools.partial(torch_runner, matmul=_UnevenMatmul())
        ),
        random.Random(7),
    )
    tokens = random_tokens(rng, 40, bench.vocab_size)
    expected = cold(bench, tokens)
    feed = bench.feed(tokens)
    assert not same_bits(bench.run(feed, [10] * 4), expected[0])
    assert bench.kv(feed) != expected[1]


def test_these_tests_see_a_block_that_is_not_the_right_one(make_bench: MakeBench) -> None:
    bench, rng = make_bench(Source(VARIANTS["llama"]), 80), random.Random(8)
    tokens = random_tokens(rng, 100, bench.vocab_size)
    expected = cold(bench, tokens)
    stranger = bench.feed(random_tokens(rng, 32, bench.vocab_size))
    bench.run(stranger, [32])
    feed = bench.feed(tokens, shared=stranger.blocks)
    assert not same_bits(bench.run(feed, [100]), expected[0])


@pytest.mark.model
@pytest.mark.parametrize("length", [16, 257, 520])
def test_real_model(real_bench: Bench, length: int) -> None:
    """The 135M model: in chunks, among 16 neighbours, token by token at the end."""
    rng = random.Random(length)
    tokens = random_tokens(rng, length, real_bench.vocab_size)
    expected = cold(real_bench, tokens)
    feed = real_bench.feed(tokens)
    check(real_bench, feed, real_bench.run(feed, [64] * length), expected, "in chunks of 64")
    neighbours = [
        real_bench.feed(random_tokens(rng, rng.randint(1, 60), real_bench.vocab_size)) for _ in range(16)
    ]
    real_bench.step(*((n, n.left - 1) for n in neighbours if n.left > 1))
    feed = real_bench.feed(tokens)
    real_bench.step((feed, length - 1))
    logits = real_bench.step(*((n, 1) for n in neighbours[:9]), (feed, 1), *((n, 1) for n in neighbours[9:]))[
        9
    ]
    assert logits is not None
    check(real_bench, feed, logits, expected, "decoded among 16")
    for neighbour in neighbours:
        real_bench.release(neighbour)


@pytest.fixture(scope="module", params=["torch", "native"])
def real_bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    checkpoint = open_checkpoint(resolve_model("smollm2"))

    def native(_: TensorSource, pool: KvPool) -> NativeRunner:
        return NativeRunner(open_packed(checkpoint, CACHE_DIR), pool, Kernels(library(), 2))

    bench = Bench(checkpoint, 160, make_runner=native if request.param == "native" else torch_runner)
    yield bench
    bench.close()
