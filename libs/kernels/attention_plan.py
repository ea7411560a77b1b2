"""Which tiles of KV a group of sequences reads, and what each row may see in them.

Keys are read in tiles of fixed boundaries, multiples of `tile_tokens`, whatever the chunk: so every row adds the
same numbers in the same order. Example with tiles of 4, three sequences of 2 rows each (x), sorted by length:

    tile         0     |1     |2          sequences
    longest      . . . . . . . . . x x       0
    middle       . . . . . x x               1
    shortest     . x x                       2
    read by      0..3   0..2   0..1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_TILE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of keys and the part of the group that sees some of them."""

    sequences: slice  # of the group's sequences
    first_row: int  # rows before it see nothing here
    blocks: Tensor  # [sequences, blocks of the tile] ids in the pool; where a sequence has ended, any
    written: tuple[int, ...]  # for each sequence, how many of the tile's tokens it has
    shown: Tensor | None  # [sequences, 1, rows, 1, keys] 1 where a row sees a key, else 0; None: all see all
    bias: Tensor | None  # the same places, 0 and minus infinity


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """`num_sequences` sequences, longest first, with `num_rows` query rows each, their last tokens."""

    num_sequences: int
    num_rows: int
    tiles: tuple[Tile, ...]


def tile_tokens(block_size: int) -> int:
    """Tokens in a tile: whole blocks, about 256 tokens."""
    return block_size * max(1, _TILE_TOKENS // block_size)


def plan_attention(
    tables: Sequence[Sequence[int]],
    ends: Sequence[int],
    num_rows: int,
    block_size: int,
    window: int | None = None,
) -> AttentionGroup:
    """Plans one group. `tables` are block tables, `ends` the lengths with the rows, in tokens, longest first.

    With `window`, a row sees itself and the `window - 1` tokens before it.
    """
    size = tile_tokens(block_size)
    lengths = np.array(ends, np.int64)
    if (np.diff(lengths) > 0).any():
        raise ValueError("sequences of a group must be sorted, longest first")
    first_tiles = np.zeros_like(lengths)
    if window is not None:
        first_tiles = np.maximum(lengths - num_rows + 1 - window, 0) // size
    blocks = _padded(tables, -(-int(lengths[0]) // size) * (size // block_size))
    tiles = []
    for index in range(int(first_tiles.min()), -(-int(lengths[0]) // size)):
        # Longest first, so those that reach the tile are a prefix, those whose window has not left it a suffix.
        low = int((first_tiles > index).sum())
        high = int((lengths > index * size).sum())
        if low < high:
            sequences = slice(low, high)
            span = slice(index * size // block_size, (index + 1) * size // block_size)
            places = torch.from_numpy(blocks[sequences, span])
            tiles.append(_tile(sequences, places, lengths[sequences], num_rows, index * size, size, window))
    return AttentionGroup(len(lengths), num_rows, tuple(tiles))


def _tile(
    sequences: slice,
    blocks: Tensor,
    lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
    num_rows: int,
    start: int,
    size: int,
    window: int | None,
) -> Tile:
    first_row = start - int(lengths[0]) + num_rows  # of the longest; others see less
    first_row = max(0, min(first_row, num_rows - 2))  # never a single row of several: see Matmul.bmm
    rows = lengths[:, None, None] - num_rows + np.arange(first_row, num_rows)[:, None]
    shown = bias = None
    if start + size > int(lengths[-1]) - num_rows + 1 or window is not None:
        keys = np.arange(start, start + size)
        seen = keys <= rows
        if window is not None:
            seen &= keys > rows - window
        if not seen.all():
            shown = torch.from_numpy(seen)[:, None, :, None, :].float()
            bias = shown.log()
    written = tuple(np.minimum(lengths - start, size).tolist())
    return Tile(sequences, first_row, blocks, written, shown, bias)


def _padded(tables: Sequence[Sequence[int]], width: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Block tables as one array, [sequences, width]; missing blocks repeat the first, which is always there."""
    result = np.empty((len(tables), width), np.int64)
    for row, table in zip(result, tables, strict=True):
        count = min(len(table), width)
        row[:count] = table[:count]
        row[count:] = table[0]
    return result
