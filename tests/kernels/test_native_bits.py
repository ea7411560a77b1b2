"""A row keeps its bits in the native kernels, whatever is beside it, for all numbers of threads and instruction sets.

The avx512vnni library also uses the matrix unit (AMX) where the CPU has one: for sixteen rows and more.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from libs.kernels.cases import spoil_unwritten
from libs.kernels.kv import LayerKv
from libs.kernels.native.formats import Format
from libs.kernels.native.kernels import Kernels
from tests.kernels.native_rig import (
    BatchRows,
    Shape,
    attention,
    every_team,
    linear,
    rope_and_write,
    same_bits,
)
from tests.kernels.packed import Floats, random_packed


def normal(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape, np.float32)


@pytest.mark.parametrize("format", Format, ids=lambda format: format.name)
def test_linear(format: Format) -> None:
    """Rows in any company: some paths are for few rows, some for many, the matrix unit takes sixteen."""
    rng = np.random.default_rng(int(format))
    matrix, bias = random_packed(rng, format, 49, 288), normal(rng, 49)
    x = normal(rng, 70, 288) * np.exp(normal(rng, 70, 1) * 3)
    expected = linear(every_team()[0], x, matrix, bias)
    for team in every_team():
        for _ in range(6):
            chosen = rng.choice(70, rng.integers(1, 40), replace=False)
            assert same_bits(linear(team, x[chosen], matrix, bias), expected[chosen]), f"{len(chosen)} rows"
        for count in (1, 2, 8, 15, 16, 17, 33, 70):
            assert same_bits(linear(team, x[:count], matrix, bias), expected[:count]), f"{count} rows"


@pytest.mark.parametrize("format", [Format.Q4_F16, Format.Q8_F32, Format.F32], ids=lambda format: format.name)
def test_linear_of_numbers_that_are_none(format: Format) -> None:
    rng = np.random.default_rng(0)
    matrix, x = random_packed(rng, format, 17, 64), normal(rng, 20, 64)
    x[3, 5], x[4, 6], x[5, 7], x[6], x[7, 8] = np.nan, np.inf, -np.inf, 0.0, 1e-44
    expected = linear(every_team()[0], x, matrix)
    for team in every_team():
        assert same_bits(linear(team, x, matrix), expected)
        assert all(same_bits(linear(team, x[i : i + 1], matrix), expected[i : i + 1]) for i in range(20))


@pytest.mark.parametrize("width", [1, 7, 16, 100, 576])
def test_element_by_element(width: int) -> None:
    rng = np.random.default_rng(width)
    x, weight, gate_up = normal(rng, 21, width) * 9, normal(rng, width), normal(rng, 21, 2 * width) * 9
    first = every_team()[0]
    normed, gated = first.rms_norm(x, weight, 1e-5), first.silu_mul(gate_up)
    for team in every_team():
        for rows in (slice(0, 21), slice(3, 4), slice(5, 19)):
            assert same_bits(team.rms_norm(x[rows], weight, 1e-5), normed[rows])
            assert same_bits(team.silu_mul(gate_up[rows]), gated[rows])


def test_exp() -> None:
    """Wherever a number stands in its array."""
    x = np.concatenate([np.linspace(-100, 88, 10_007), [np.nan, -np.inf, 0.0, -0.0]]).astype(np.float32)
    expected = every_team()[0].exp(x)
    for team in every_team():
        for part in (slice(None), slice(1, 2), slice(5, 40), slice(9999, None)):
            assert same_bits(team.exp(x[part]), expected[part])


# ---------------------------------------------------------------- attention


@dataclass(frozen=True)
class Context:
    """Sequences with all their KV in a pool, and a query for each of their positions."""

    layer: LayerKv
    tables: list[list[int]]
    lengths: list[int]
    queries: list[Floats]  # [length, heads, dim]
    window: int | None

    def attend(self, team: Kernels, parts: Sequence[tuple[int, int, int]]) -> list[Floats]:
        """Rows `start` to `end` of each (sequence, start, end), in one batch."""
        query = np.concatenate([self.queries[s][start:end] for s, start, end in parts])
        tables = [self.tables[s] for s, _, _ in parts]
        starts, counts = [start for _, start, _ in parts], [end - start for _, start, end in parts]
        result = attention(team, query, self.layer, tables, starts, counts, self.window)
        return np.split(result, np.cumsum(counts)[:-1])


# heads, kv heads, dim, tokens in a block, window, lengths
CONTEXTS: list[tuple[int, int, int, int, int | None, list[int]]] = [
    (9, 3, 64, 16, None, [600, 257, 256, 33, 1]),
    (8, 1, 16, 16, 100, [700, 90]),
    (2, 2, 8, 5, None, [300, 17]),
    (5, 1, 80, 32, 300, [640, 31]),
    (2, 1, 128, 64, None, [330, 65]),
    (14, 2, 16, 16, None, [40, 280]),  # seven query heads for a kv head
    (6, 1, 64, 48, 20, [290, 12]),
]


def context(rng: np.random.Generator, chosen: tuple[int, int, int, int, int | None, list[int]]) -> Context:
    heads, kv_heads, dim, block_size, window, lengths = chosen
    counts = [-(-length // block_size) for length in lengths]
    pool = torch.from_numpy(normal(rng, sum(counts) + 2, 2, 2, kv_heads, block_size * dim)).half()
    layer = LayerKv.of(pool[:, 1], dim)
    ids = rng.permutation(len(pool)).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    spoil_unwritten(layer, tables, lengths, ids)
    queries = [normal(rng, length, heads, dim) * 3 for length in lengths]
    return Context(layer, tables, lengths, queries, window)


@pytest.mark.parametrize("chosen", CONTEXTS, ids=str)
def test_attention_in_random_chunks_and_batches(
    chosen: tuple[int, int, int, int, int | None, list[int]],
) -> None:
    """Every sequence is cut at random; pieces of all of them meet in random batches."""
    given = context(np.random.default_rng(0), chosen)
    whole = [(i, 0, length) for i, length in enumerate(given.lengths)]
    expected = given.attend(every_team()[0], whole)
    rng = random.Random(1)
    for team in every_team():
        parts = [part for i, length in enumerate(given.lengths) for part in _cut(rng, i, length)]
        rng.shuffle(parts)
        while parts:
            batch = [parts.pop() for _ in range(min(len(parts), rng.randint(1, 6)))]
            for (i, start, end), actual in zip(batch, given.attend(team, batch), strict=True):
                assert same_bits(actual, expected[i][start:end]), f"sequence {i}, rows {start} to {end}"


def _cut(rng: random.Random, sequence: int, length: int) -> list[tuple[int, int, int]]:
    """Pieces of few rows, which take one path, and of many, which take another."""
    parts, start = [], 0
    while start < length:
        end = min(start + rng.choice((1, 1, 2, 5, 8, 9, 31, 32, 33, 150)), length)
        parts.append((sequence, start, end))
        start = end
    return parts


def test_calls_in_quick_succession() -> None:
    """A thread that is late to leave one call must not take part in the next with what it knew of the last."""
    given = context(np.random.default_rng(2), CONTEXTS[1])
    batches = [[(0, 0, 40), (1, 0, 9)], [(0, 99, 100), (1, 7, 8)], [(1, 20, 21)], [(1, 0, 70)]]
    for team in every_team():
        expected = [given.attend(team, batch) for batch in batches]
        for _ in range(200):
            for batch, wanted in zip(batches, expected, strict=True):
                for one, other in zip(given.attend(team, batch), wanted, strict=True):
                    assert same_bits(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["f16", "f32"])
@pytest.mark.parametrize("dim", [8, 64, 80])
def test_rope_and_write(dtype: torch.dtype, dim: int) -> None:
    """One sequence in one chunk, or cut in two beside another: the same queries and the same pool."""
    rng, heads, kv_heads, block_size = np.random.default_rng(0), 3, 1, 16
    shape = Shape(heads, kv_heads, dim)
    norms = (normal(rng, dim), normal(rng, dim))
    qkv, other = normal(rng, 40, (heads + 2 * kv_heads) * dim), normal(rng, 5, (heads + 2 * kv_heads) * dim)
    start = torch.from_numpy(normal(rng, 6, 2, 2, kv_heads, block_size * dim)).to(dtype)
    results = []
    for team in every_team():
        for cut in (None, 1, 23):
            pool = start.clone()
            layer = LayerKv.of(pool[:, 1], dim)
            own, theirs = [5, 0, 3], [1]
            if cut is None:
                turned = rope_and_write(team, shape, qkv, layer, BatchRows([own], [0], [40]), norms)
                rope_and_write(team, shape, other, layer, BatchRows([theirs], [3], [5]), norms)
            else:
                rows = np.concatenate([qkv[cut:], other, qkv[:cut]])
                batch = BatchRows([own, theirs, own], [cut, 3, 0], [40 - cut, 5, cut])
                turned = rope_and_write(team, shape, rows, layer, batch, norms)
                turned = np.concatenate([turned[-cut:], turned[: 40 - cut]])
            results.append((turned, pool))
    for turned, pool in results:
        assert same_bits(turned, results[0][0])
        assert pool.numpy().tobytes() == results[0][1].numpy().tobytes()
