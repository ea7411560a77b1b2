"""Attention over the paged pool, one tile of keys at a time, without a copy of any sequence's whole KV.

Exact: a row's result has the same bits in every batch and every chunking. Tiles have fixed boundaries and each
product a fixed [dim] x [tile] shape per row; a tile in which a row sees nothing multiplies its sums by exactly 1
and adds exactly 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from libs.kernels.attention_plan import AttentionGroup, Tile
from libs.kernels.kv import LayerKv, kv_read
from libs.kernels.matmul import Matmul
from libs.kernels.workspace import Workspace

_LOWEST = -1e30  # below any score, and finite: the difference of two of them is 0, not NaN
_EXP_MIN = (
    -87.0
)  # MKL takes fifty times as long for exponentials below the smallest normal number, exp(-87.3)


@dataclass(frozen=True, slots=True)
class _Sums:
    """The running softmax of all rows of a group, after some tiles (Milakov and Gimelshein, 2018)."""

    queries: (
        Tensor  # [sequences, kv_heads, rows, dim], scaled; rows = query row x head of the kv head's group
    )
    maximum: Tensor  # [sequences, kv_heads, rows, 1] largest score
    total: Tensor  # [sequences, kv_heads, rows, 1] sum of exp(score - maximum)
    mixed: Tensor  # [sequences, kv_heads, rows, dim] sum of exp(score - maximum) * value


def paged_attention(
    query: Tensor, layer: LayerKv, group: AttentionGroup, matmul: Matmul, workspace: Workspace
) -> Tensor:
    """Causal softmax(q k / sqrt(dim)) v: [sequences * rows, heads, dim] -> [sequences * rows, heads * dim]

    The keys and values of the rows themselves must stand in the pool already.
    """
    num_tokens, num_heads, dim = query.shape
    num_kv_heads = layer.keys.shape[1]
    shape = (group.num_sequences, group.num_rows, num_kv_heads, num_heads // num_kv_heads, dim)
    sums = _start(query.view(shape), workspace)
    for tile in group.tiles:
        _add_tile(sums, tile, shape[3], layer, matmul, workspace)
    mixed = _by_row(
        sums.mixed / sums.total, group.num_rows, shape[3]
    )  # a new tensor: the result outlives scratch
    return mixed.permute(0, 2, 1, 3, 4).reshape(num_tokens, num_heads * dim)


def _start(query: Tensor, workspace: Workspace) -> _Sums:
    """`query` [sequences, rows, kv_heads, heads of a group, dim]"""
    num_sequences, num_rows, num_kv_heads, group_size, dim = query.shape
    rows = num_rows * group_size
    padded = max(rows, 2)  # see Matmul.bmm
    queries = workspace.take("attention.queries", (num_sequences, num_kv_heads, padded, dim))
    if padded > rows:
        queries.zero_()
    scale = 1 / math.sqrt(dim)
    torch.mul(query.permute(0, 2, 1, 3, 4), scale, out=_by_row(queries, num_rows, group_size))
    shape = (num_sequences, num_kv_heads, padded, 1)
    return _Sums(
        queries,
        maximum=torch.full(shape, _LOWEST),
        total=torch.zeros(shape),
        mixed=workspace.take("attention.mixed", tuple(queries.shape)).zero_(),
    )


def _add_tile(
    sums: _Sums, tile: Tile, group_size: int, layer: LayerKv, matmul: Matmul, workspace: Workspace
) -> None:
    rows = slice(tile.first_row * group_size, None)
    queries, maximum, total, mixed = (
        part[tile.sequences, :, rows] for part in (sums.queries, sums.maximum, sums.total, sums.mixed)
    )
    keys, values = _read(layer, tile, workspace)
    scores = workspace.take("attention.scores", (*queries.shape[:3], keys.shape[3]))
    matmul.bmm(queries.flatten(0, 1), keys.flatten(0, 1), out=scores.flatten(0, 1))
    if tile.bias is not None:
        _by_row(scores, tile.bias.shape[2], group_size).add_(tile.bias)
    highest = torch.maximum(scores.amax(-1, keepdim=True), maximum)
    kept = maximum.sub_(highest).clamp_min_(_EXP_MIN).exp_()
    weights = scores.sub_(highest).clamp_min_(_EXP_MIN).exp_()
    if tile.shown is not None:
        _by_row(weights, tile.shown.shape[2], group_size).mul_(tile.shown)
    total.mul_(kept).add_(weights.sum(-1, keepdim=True))
    added = workspace.take("attention.added", tuple(queries.shape))
    matmul.bmm(weights.flatten(0, 1), values.flatten(0, 1), out=added.flatten(0, 1))
    mixed.mul_(kept).add_(added)
    maximum.copy_(highest)


def _read(layer: LayerKv, tile: Tile, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Keys and values of a tile. Behind a sequence's end stale bytes may be NaN, which a weight of 0 keeps: zeroed."""
    keys, values = kv_read(layer, tile.blocks, workspace)
    for index, written in enumerate(tile.written):
        if written < values.shape[2]:
            keys[index, :, :, written:].zero_()
            values[index, :, written:].zero_()
    return keys, values


def _by_row(x: Tensor, num_rows: int, group_size: int) -> Tensor:
    """[sequences, kv_heads, rows, n] as [sequences, kv_heads, query rows, heads of a group, n], padding cut off."""
    return x[:, :, : num_rows * group_size].view(*x.shape[:2], num_rows, group_size, x.shape[3])


def attention_reference(
    query: Tensor,
    layer: LayerKv,
    tables: list[list[int]],
    ends: list[int],
    num_rows: int,
    window: int | None = None,
) -> Tensor:
    """Sequence by sequence over all keys at once, in float64. Arguments as of `plan_attention`."""
    num_heads, dim = query.shape[1:]
    per_sequence = query.double().view(len(ends), num_rows, num_heads, dim)
    results = []
    for rows, table, end in zip(per_sequence, tables, ends, strict=True):
        keys = (
            layer.keys[table].double().permute(1, 0, 3, 2).flatten(1, 2)[:, :end]
        )  # [kv_heads, tokens, dim]
        values = layer.values[table].double().transpose(0, 1).flatten(1, 2)[:, :end]
        keys, values = (kv.repeat_interleave(num_heads // len(kv), dim=0) for kv in (keys, values))
        positions = torch.arange(end - num_rows, end)[:, None]
        hidden = torch.arange(end) > positions
        if window is not None:
            hidden |= torch.arange(end) <= positions - window
        scores = torch.einsum("rhd,hkd->hrk", rows, keys) / math.sqrt(dim)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        results.append(torch.einsum("hrk,hkd->rhd", weights, values).reshape(num_rows, num_heads * dim))
    return torch.cat(results)
