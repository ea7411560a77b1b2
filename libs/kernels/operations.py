"""Every operation with its versions, its cases and how far a version may be from the reference.

A new kernel is one more entry of `versions`: tests/kernels runs all versions on all cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from libs.kernels import cases
from libs.kernels.activation import silu_mul
from libs.kernels.attention import paged_attention
from libs.kernels.attention_plan import plan_attention
from libs.kernels.cases import Case, as_one
from libs.kernels.kv import LayerKv, kv_read, kv_write
from libs.kernels.matmul import Matmul, NativeMatmul, TiledMatmul
from libs.kernels.norm import rms_norm
from libs.kernels.rope import RopeTable, rope
from libs.kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Operation:
    """`versions` take a case's arguments; `limit` is a `relative_error`."""

    name: str
    cases: Callable[[], Iterator[Case]]
    versions: dict[str, Callable[..., Tensor]]
    limit: float = field(default=1e-6, kw_only=True)


def _rope(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    table = RopeTable.build(frequencies.numpy().astype(np.float64), int(positions.max()) + 1)
    out = torch.empty_like(x)
    rope(x, table.at(positions), out)
    return out


def _kv_write(layer: LayerKv, keys: Tensor, values: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
    result = layer.copy()
    kv_write(result, keys, values, blocks, offsets, Workspace())
    return as_one(result.keys, result.values)


def _kv_read(layer: LayerKv, blocks: Tensor) -> Tensor:
    return as_one(*kv_read(layer, blocks, Workspace()))


def _attention(
    matmul: Matmul,
    query: Tensor,
    layer: LayerKv,
    tables: list[list[int]],
    ends: list[int],
    num_rows: int,
    window: int | None,
) -> Tensor:
    group = plan_attention(tables, ends, num_rows, layer.block_size, window)
    return paged_attention(query, layer, group, matmul, Workspace())


OPERATIONS = (
    Operation(
        "linear",
        cases.linear_cases,
        {"native": NativeMatmul().linear, "tiled": TiledMatmul().linear},
        limit=2e-6,
    ),
    Operation("rms_norm", cases.rms_norm_cases, {"torch": rms_norm}),
    Operation("silu_mul", cases.silu_mul_cases, {"torch": silu_mul}),
    Operation("rope", cases.rope_cases, {"torch": _rope}),
    Operation("kv_write", cases.kv_write_cases, {"torch": _kv_write}, limit=0.0),
    Operation("kv_read", cases.kv_read_cases, {"torch": _kv_read}, limit=0.0),
    Operation(
        "paged_attention",
        cases.attention_cases,
        {"native": partial(_attention, NativeMatmul()), "tiled": partial(_attention, TiledMatmul())},
        limit=2e-6,
    ),
)
