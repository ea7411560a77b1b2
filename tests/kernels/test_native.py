"""The native kernels against float64 references, on every instruction set of this CPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from libs.kernels.cases import attention_cases, relative_error, rms_norm_cases, silu_mul_cases
from libs.kernels.kv import LayerKv, kv_write_reference
from libs.kernels.native.formats import QUANTISED, Format
from libs.kernels.native.kernels import Kernels
from libs.kernels.norm import rms_norm_reference
from libs.kernels.operations import OPERATIONS
from libs.kernels.rope import rope_reference
from tests.kernels.native_rig import (
    BatchRows,
    Shape,
    attention,
    embed,
    linear,
    matrix_of,
    one_set,
    rope_and_write,
)
from tests.kernels.packed import Floats, Product, quantised_rows, random_packed

__all__ = ["one_set"]

LIMITS = {operation.name: operation.limit for operation in OPERATIONS}
ROWS = (1, 2, 3, 5, 17, 64)
OUTPUTS = (1, 15, 16, 17, 33)
DEPTHS = (32, 64, 96, 576, 1536)
FLOAT_DEPTHS = (1, 7, 32, 33, 576)
ROUNDING = 1e-6  # of the sum of magnitudes: float32 sums of a thousand products stay well below
EIGHT_BITS = 1e-2  # what it costs to round activations to 8 bits


def normal(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape, np.float32)


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("format", Format, ids=lambda format: format.name)
def test_linear(one_set: Kernels, format: Format) -> None:
    rng = np.random.default_rng(int(format))
    depths = DEPTHS if format in QUANTISED else FLOAT_DEPTHS
    for n, k, with_bias in itertools.product(OUTPUTS, depths, (False, True)):
        matrix = random_packed(rng, format, n, k)
        bias = normal(rng, n) if with_bias else None
        for rows in ROWS:
            x = normal(rng, rows, k) * np.float32(3)
            seen = quantised_rows(x) if format in QUANTISED else x.astype(np.float64)
            actual = linear(one_set, x, matrix, bias)
            error = Product.of(seen, matrix, bias).error(actual)
            assert error <= ROUNDING, f"{rows}x{k} by {n}x{k}, bias {with_bias}: {error:.2e}"
            loss = Product.of(x.astype(np.float64), matrix, bias).error(actual)
            assert loss <= EIGHT_BITS, f"{rows}x{k} by {n}x{k}, bias {with_bias}: {loss:.2e}"


@pytest.mark.parametrize("format", [Format.Q4_F16, Format.Q8_F32, Format.Q8X2_F32], ids=lambda f: f.name)
def test_linear_at_the_ends_of_what_eight_bits_hold(one_set: Kernels, format: Format) -> None:
    """All activations at +-127, and weights likewise: sums of 16 bits would overflow."""
    matrix = random_packed(np.random.default_rng(0), format, 33, 96)
    x = np.sign(matrix.steps[[0, 5, 32]]).astype(np.float32) * np.float32(127)
    assert Product.of(quantised_rows(x), matrix).error(linear(one_set, x, matrix)) <= ROUNDING


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-38, 1e-36, 1e30])
def test_linear_of_very_small_and_very_large_rows(one_set: Kernels, scale: float) -> None:
    """Zeros have no largest magnitude to divide by; nearly nothing may come out as nothing, never as NaN."""
    rng = np.random.default_rng(0)
    matrix = random_packed(rng, Format.Q8_F32, 17, 64)
    x = (rng.uniform(0.5, 1, (3, 64)) * scale).astype(np.float32)
    actual = linear(one_set, x, matrix)
    assert np.isfinite(actual).all()
    exact = x.astype(np.float64) @ matrix.weights.T
    tolerance = EIGHT_BITS * np.abs(exact).max() + 1e-36
    assert np.abs(actual - exact).max() <= tolerance


@pytest.mark.parametrize("format", Format, ids=lambda format: format.name)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [3, 20])
def test_a_bad_number_poisons_its_row_alone(one_set: Kernels, format: Format, bad: float, rows: int) -> None:
    rng = np.random.default_rng(1)
    matrix, x = random_packed(rng, format, 33, 96), normal(rng, rows, 96)
    clean = linear(one_set, x, matrix)
    x[1, 77] = bad
    spoilt = linear(one_set, x, matrix)
    assert not np.isfinite(spoilt[1]).any()
    others = np.arange(rows) != 1
    assert np.array_equal(spoilt[others].view(np.int32), clean[others].view(np.int32))


@pytest.mark.parametrize("format", Format, ids=lambda format: format.name)
def test_nothing_in_nothing_out(one_set: Kernels, format: Format) -> None:
    matrix = random_packed(np.random.default_rng(0), format, 33, 64)
    assert linear(one_set, np.empty((0, 64), np.float32), matrix).shape == (0, 33)
    assert embed(one_set, matrix, []).shape == (0, 64)


def test_linear_with_its_norm(one_set: Kernels) -> None:
    rng = np.random.default_rng(2)
    matrix = random_packed(rng, Format.F32, 33, 100)
    x, weight = normal(rng, 5, 100) * 30, normal(rng, 100)
    normed = rms_norm_reference(torch.from_numpy(x), torch.from_numpy(weight), 1e-5).numpy()
    actual = one_set.linear(matrix_of(matrix), x, norm=weight, eps=1e-5)
    assert Product.of(normed, matrix).error(actual) <= ROUNDING


@pytest.mark.parametrize("format", Format, ids=lambda format: format.name)
def test_rows_of_an_embedding_are_the_weights(one_set: Kernels, format: Format) -> None:
    matrix = random_packed(np.random.default_rng(3), format, 49, 96)
    tokens = [0, 48, 16, 15, 16, 31]
    actual = embed(one_set, matrix, tokens)
    assert np.abs(actual - matrix.weights[tokens]).max() <= 1e-6


# ---------------------------------------------------------------- element by element


def test_rms_norm(one_set: Kernels) -> None:
    for case in rms_norm_cases():
        x, weight, eps = case.arguments
        actual = one_set.rms_norm(x.numpy(), weight.numpy(), eps)
        error = relative_error(torch.from_numpy(actual), case.expected)
        assert error <= LIMITS["rms_norm"], f"{case.name}: {error:.2e}"


def test_silu_mul(one_set: Kernels) -> None:
    for case in silu_mul_cases():
        actual = one_set.silu_mul(case.arguments[0].numpy())
        error = relative_error(torch.from_numpy(actual), case.expected)
        assert error <= LIMITS["silu_mul"], f"{case.name}: {error:.2e}"


def test_exp(one_set: Kernels) -> None:
    """Within 2 units in the last place; softmax rests on exp(0) being 1."""
    x = np.concatenate([np.linspace(-86.9, 88, 200_001), [0.0, -0.0, 1e-10, -1e-10]]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    units = np.abs(one_set.exp(x) - exact) / np.spacing(exact.astype(np.float32))
    assert units.max() <= 2
    assert one_set.exp(np.zeros(3, np.float32)).tolist() == [1.0, 1.0, 1.0]
    assert one_set.exp(np.array([-1e4, -np.inf], np.float32)).max() <= np.exp(-86.9)
    assert np.isnan(one_set.exp(np.array([0.0, np.nan], np.float32))).tolist() == [False, True]
    assert one_set.exp(np.empty(0, np.float32)).shape == (0,)


# ---------------------------------------------------------------- the pool


def test_attention(one_set: Kernels) -> None:
    """NaN stands in all places of the pool that were not written."""
    for case in attention_cases():
        query, layer, tables, ends, num_rows, window = case.arguments
        starts = [end - num_rows for end in ends]
        actual = attention(one_set, query.numpy(), layer, tables, starts, [num_rows] * len(ends), window)
        error = relative_error(torch.from_numpy(actual), case.expected)
        assert error <= LIMITS["paged_attention"], f"{case.name}: {error:.2e}"


def test_attention_of_nobody(one_set: Kernels) -> None:
    layer = LayerKv.of(torch.zeros(2, 2, 1, 16 * 8), 8)
    assert attention(one_set, np.empty((0, 2, 8), np.float32), layer, [], [], []).shape == (0, 16)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("count", [2, 20])
def test_a_damaged_sequence_harms_no_other(one_set: Kernels, bad: float, count: int) -> None:
    rng = np.random.default_rng(4)
    layer = LayerKv.of(torch.from_numpy(normal(rng, 9, 2, 1, 16 * 16)), 16)
    rows = ([[0, 1, 2], [3, 4, 5], [6, 7, 8]], [20] * 3, [count] * 3)
    query = normal(rng, 3 * count, 3, 16)
    clean = attention(one_set, query, layer, *rows)
    layer.keys[3], layer.values[4] = bad, bad
    spoilt = attention(one_set, query, layer, *rows)
    middle = slice(count, 2 * count)
    assert not np.isfinite(spoilt[middle]).any()
    spoilt[middle] = clean[middle]
    assert np.array_equal(spoilt.view(np.int32), clean.view(np.int32))


@pytest.mark.parametrize("dim", [8, 16, 64, 80, 128])
@pytest.mark.parametrize("block_size", [5, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["f16", "f32"])
@pytest.mark.parametrize("with_norms", [False, True])
def test_rope_and_write(
    one_set: Kernels, dim: int, block_size: int, dtype: torch.dtype, with_norms: bool
) -> None:
    """Queries are rotated and scaled, keys rotated, values as they are; no other byte of the pool changes."""
    rng, heads, kv_heads = np.random.default_rng(dim), 6, 2
    pool = torch.from_numpy(normal(rng, 12, 3, 2, kv_heads, block_size * dim)).to(dtype)
    layer = LayerKv.of(pool[:, 1], dim)
    starts, counts, tables = [block_size - 1, 0, 7], [3, 1, block_size], [[4, 0], [7], [2, 11, 5, 9]]
    qkv = normal(rng, sum(counts), (heads + 2 * kv_heads) * dim)
    qkv[0, -1], qkv[1, -2] = 1e6, -1e6  # beyond float16
    shape = Shape(heads, kv_heads, dim)
    norms = (normal(rng, dim), normal(rng, dim)) if with_norms else None

    positions = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
    all_heads = torch.from_numpy(qkv).view(len(qkv), -1, dim)
    split = torch.split(all_heads, [heads, kv_heads, kv_heads], dim=1)
    query, keys = (
        rope_reference(
            part if norm is None else rms_norm_reference(part, torch.from_numpy(norm), 1e-6),
            positions,
            torch.from_numpy(shape.frequencies),
        )
        for part, norm in zip(split[:2], norms or (None, None), strict=True)
    )
    owners = [table for table, count in zip(tables, counts, strict=True) for _ in range(count)]
    blocks = torch.tensor([t[p // block_size] for t, p in zip(owners, positions.tolist(), strict=True)])
    expected = pool.clone()
    kv_write_reference(LayerKv.of(expected[:, 1], dim), keys, split[2], blocks, positions % block_size)

    turned = rope_and_write(one_set, shape, qkv, layer, BatchRows(tables, starts, counts), norms)
    actual_query = torch.from_numpy(turned).view(len(qkv), -1, dim)[:, :heads]
    assert relative_error(actual_query, query / dim**0.5) <= 1e-6
    rounding = 1e-3 if dtype == torch.float16 else 1e-5  # a key may fall on the other side of a half's edge
    assert torch.allclose(pool.float(), expected.float(), rtol=rounding, atol=1e-6)
    assert torch.equal(pool[:, :, 1], expected[:, :, 1]), "values are stored as they are"
    written = torch.zeros(pool.shape, dtype=torch.bool)
    LayerKv.of(written[:, 1], dim).keys[blocks, :, :, positions % block_size] = True
    assert torch.equal(pool[:, :, 0][~written[:, :, 0]], expected[:, :, 0][~written[:, :, 0]])
