"""The rows of a step as flat tensors, ordered so that rows which attend together lie together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from libs.engine.kv.layout import KvLayout
from libs.engine.plan import Row
from libs.kernels.attention_plan import AttentionGroup, plan_attention, tile_tokens

_GROUP_ROWS = 256  # of one sequence that attend together: their scores stay near the cores
_TILE_BYTES = 2 << 20  # of float32 KV that rows which attend together read at a time: stays in a core's cache


@dataclass(frozen=True, slots=True)
class Batch:
    """What a forward pass needs. All index tensors are int64, one entry per token."""

    tokens: Tensor
    positions: Tensor
    blocks: Tensor  # block of the pool that takes the token's KV
    offsets: Tensor  # place in that block
    groups: tuple[AttentionGroup, ...]  # cover the tokens, in order
    drawn: Tensor  # tokens whose logits are wanted: index of each, in the order of the rows given


def build_batch(rows: Sequence[Row], layout: KvLayout, window: int | None = None) -> Batch:
    """Flatten rows of different sequences. Raises ValueError where a row lacks blocks."""
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i].tokens), -rows[i].end))
    ordered = [rows[i] for i in order]
    counts = np.array([len(row.tokens) for row in ordered], np.int64)
    firsts = np.cumsum(counts) - counts
    positions = np.arange(counts.sum()) + np.repeat([row.start for row in ordered] - firsts, counts)
    tokens = np.fromiter(itertools.chain.from_iterable(row.tokens for row in ordered), np.int64)
    last = {i: int(end) - 1 for i, end in zip(order, firsts + counts, strict=True)}
    drawn = [last[i] for i, row in enumerate(rows) if row.draw is not None]
    return Batch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        blocks=torch.from_numpy(_blocks(ordered, layout)),
        offsets=torch.from_numpy(positions % layout.block_size),
        groups=tuple(_groups(ordered, layout, window)),
        drawn=torch.tensor(drawn, dtype=torch.int64),
    )


def _blocks(rows: Sequence[Row], layout: KvLayout) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The block of each token."""
    parts = []
    for row in rows:
        if layout.blocks_for(row.end) > len(row.blocks):
            raise ValueError(f"row {row.request_id}: {len(row.blocks)} blocks for {row.end} tokens")
        places = np.arange(row.start, row.end) // layout.block_size
        parts.append(np.array(row.blocks, np.int64)[places])
    return np.concatenate(parts)


def _groups(rows: Sequence[Row], layout: KvLayout, window: int | None) -> Iterator[AttentionGroup]:
    """Rows of equal length attend together, as many as `_TILE_BYTES` allows; a long row does so in parts."""
    sequence_bytes = 2 * layout.num_kv_heads * layout.head_dim * tile_tokens(layout.block_size) * 4
    for num_tokens, same in itertools.groupby(rows, key=lambda row: len(row.tokens)):
        members = list(same)
        size = 1 if num_tokens > _GROUP_ROWS else max(1, _TILE_BYTES // sequence_bytes)
        for start in range(0, len(members), size):
            part = members[start : start + size]
            tables = [row.blocks for row in part]
            for first in range(0, num_tokens, _GROUP_ROWS):
                count = min(_GROUP_ROWS, num_tokens - first)
                ends = [row.start + first + count for row in part]
                yield plan_attention(tables, ends, count, layout.block_size, window)
