"""Cases of each operation: inputs, and what its reference makes of them.

Sizes are those of real models made small, with the odd ones that break kernels: one row, rows beyond a
register's width, one head, blocks that do not divide a tile, stale NaN where nothing was written.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from libs.kernels.activation import silu_mul_reference
from libs.kernels.attention import attention_reference
from libs.kernels.kv import LayerKv, kv_read_reference, kv_write_reference
from libs.kernels.norm import rms_norm_reference
from libs.kernels.rope import rope_reference

_ROWS = (1, 2, 17, 64)


@dataclass(frozen=True, slots=True)
class Case:
    """One call: `arguments` of every version of the operation, `expected` from its reference."""

    name: str
    arguments: tuple[Any, ...]
    expected: Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| over all elements; infinite where one is not finite or shapes differ."""
    if actual.shape != expected.shape or not actual.isfinite().all():
        return float("inf")
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


def linear_cases() -> Iterator[Case]:
    random = torch.Generator().manual_seed(1)
    for rows, (n, k), with_bias in itertools.product(_ROWS, ((960, 576), (33, 72)), (False, True)):
        x, weight = _normal(random, rows, k), _normal(random, n, k)
        bias = _normal(random, n) if with_bias else None
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        yield Case(f"{rows}x{k} by {n}x{k}, bias {with_bias}", (x, weight, bias), expected)


def rms_norm_cases() -> Iterator[Case]:
    random = torch.Generator().manual_seed(2)
    for rows, dim in itertools.product(_ROWS, (64, 100, 576)):
        x, weight = _normal(random, rows, dim) * 30, _normal(random, dim)
        yield Case(f"{rows}x{dim}", (x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    x, weight = torch.zeros(2, 64), torch.ones(64)
    yield Case("zeros", (x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


def silu_mul_cases() -> Iterator[Case]:
    random = torch.Generator().manual_seed(3)
    for rows, dim in itertools.product(_ROWS, (7, 1536)):
        x = _normal(random, rows, 2 * dim) * 4
        yield Case(f"{rows}x{dim}", (x,), silu_mul_reference(x))
    x = torch.tensor([[-200.0, -90.0, 0.0, 90.0, 200.0, 1.0, 1.0, 1.0, 1.0, 1.0]])  # exp overflows at 89
    yield Case("extremes", (x,), silu_mul_reference(x))


def rope_cases() -> Iterator[Case]:
    random = torch.Generator().manual_seed(4)
    for rows, (heads, dim) in itertools.product(_ROWS, ((12, 64), (1, 16))):
        frequencies = 1e5 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        positions = torch.randint(0, 8192, (rows,), generator=random)
        x = _normal(random, rows, heads, dim)
        expected = rope_reference(x, positions, frequencies)
        yield Case(f"{rows}x{heads}x{dim}", (x, positions, frequencies), expected)


def as_one(keys: Tensor, values: Tensor) -> Tensor:
    """Keys [..., dim, tokens] and values [..., tokens, dim] as [k or v, ..., tokens, dim] in float32."""
    return torch.stack([keys.transpose(-1, -2), values]).float()


def kv_write_cases() -> Iterator[Case]:
    """A version returns the pool's layer after the write, `as_one`."""
    random = torch.Generator().manual_seed(5)
    for dtype, rows in itertools.product((torch.float16, torch.float32), _ROWS):
        layer = _layer_kv(random, dtype, block_size=16, num_heads=3, dim=64)
        places = torch.randperm(len(layer.keys) * 16, generator=random)[:rows]
        keys, values = _normal(random, rows, 3, 64), _normal(random, rows, 3, 64)
        keys[0, 0, 0] = 1e6  # beyond float16
        arguments = (layer, keys, values, places // 16, places % 16)
        expected = layer.copy()
        kv_write_reference(expected, *arguments[1:])
        yield Case(f"{dtype}, {rows} tokens", arguments, as_one(expected.keys, expected.values))


def kv_read_cases() -> Iterator[Case]:
    """A version returns keys and values `as_one`."""
    random = torch.Generator().manual_seed(6)
    for dtype, sequences in itertools.product((torch.float16, torch.float32), (1, 5)):
        layer = _layer_kv(random, dtype, block_size=16, num_heads=3, dim=64)
        blocks = torch.randint(0, len(layer.keys), (sequences, 16), generator=random)
        expected = as_one(*kv_read_reference(layer, blocks))
        yield Case(f"{dtype}, {sequences} sequences", (layer, blocks), expected)


# heads, kv heads, dim, tokens in a block, sliding window, query rows, lengths (longest first)
_ATTENTION: tuple[tuple[int, int, int, int, int | None, int, tuple[int, ...]], ...] = (
    (9, 3, 64, 16, None, 1, (1,)),
    (9, 3, 64, 16, None, 1, (700, 513, 512, 257, 256, 255, 17, 16, 15, 1)),
    (9, 3, 64, 16, None, 37, (700,)),
    (9, 3, 64, 16, None, 256, (512,)),
    (9, 3, 64, 16, None, 3, (258, 257, 4, 3)),
    (4, 4, 16, 16, None, 1, (300,)),  # one query head for a kv head, one row: padded
    (8, 2, 128, 16, None, 5, (40,)),
    (9, 3, 64, 24, None, 9, (250, 240, 100)),  # blocks that do not divide 256
    (9, 3, 64, 512, None, 2, (600, 20)),  # blocks larger than a tile
    (4, 2, 16, 16, 1, 1, (300, 5)),
    (4, 2, 16, 16, 100, 1, (900, 600, 300, 90)),
    (4, 2, 16, 16, 256, 64, (900,)),
    (2, 2, 8, 5, None, 3, (77, 6, 3)),  # a head narrower than a register, blocks of no multiple of anything
    (8, 1, 80, 32, None, 1, (300, 17, 1)),  # eight query heads for a kv head
    (8, 1, 80, 32, None, 20, (300, 20)),
    (5, 1, 64, 48, None, 2, (100, 49, 2)),
    (8, 2, 64, 64, None, 1, (65, 5)),  # a last block with little in it
    (2, 1, 64, 16, None, 1, (8192,)),
    (2, 1, 64, 16, 5000, 12, (8192,)),
    (4, 2, 80, 5, 7, 11, (100, 60, 11)),
    (3, 1, 128, 16, 300, 3, (1000, 301, 3)),
)


def attention_cases() -> Iterator[Case]:
    """A version takes query, layer of the pool, block tables, lengths, rows and window."""
    random = torch.Generator().manual_seed(7)
    shapes = itertools.product((torch.float16, torch.float32), _ATTENTION)
    for dtype, (heads, kv_heads, dim, block_size, window, rows, ends) in shapes:
        counts = [-(-end // block_size) for end in ends]
        num_blocks = sum(counts) + 3
        layer = _layer_kv(random, dtype, block_size, kv_heads, dim, num_blocks)
        ids = iter(torch.randperm(num_blocks, generator=random).tolist())
        tables = [list(itertools.islice(ids, count)) for count in counts]
        spoil_unwritten(layer, tables, ends, list(ids))
        query = _normal(random, len(ends) * rows, heads, dim) * 3
        arguments = (query, layer, tables, list(ends), rows, window)
        name = f"{dtype}, {heads}/{kv_heads}x{dim}, blocks of {block_size}, window {window}, {rows} of {ends}"
        yield Case(name, arguments, attention_reference(*arguments))


def _layer_kv(
    random: torch.Generator,
    dtype: torch.dtype,
    block_size: int,
    num_heads: int,
    dim: int,
    num_blocks: int = 40,
) -> LayerKv:
    """One layer of a pool of three: as in the engine, its blocks are not adjacent."""
    pool = _normal(random, num_blocks, 3, 2, num_heads, block_size * dim).to(dtype)
    return LayerKv.of(pool[:, 1], dim)


def spoil_unwritten(
    layer: LayerKv, tables: Sequence[Sequence[int]], ends: Sequence[int], unused: list[int]
) -> None:
    """NaN in blocks of nobody and behind each sequence's end."""
    layer.keys[unused] = torch.nan
    layer.values[unused] = torch.nan
    for table, end in zip(tables, ends, strict=True):
        used = end - (len(table) - 1) * layer.block_size
        layer.keys[table[-1], :, :, used:] = torch.nan
        layer.values[table[-1], :, used:] = torch.nan


def _normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=random)
