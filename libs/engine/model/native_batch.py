"""The rows of a pass as the flat arrays that the native kernels read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from libs.engine.kv.layout import KvLayout
from libs.engine.plan import Row
from libs.kernels.native.interface import Batch, Int32s, address


@dataclass(frozen=True, slots=True)
class NativeBatch:
    """One sequence a row of the plan; its tokens lie together, in the order of the plan."""

    tokens: Int32s  # [tokens]
    first_rows: Int32s  # [sequences + 1] where each sequence's tokens begin
    starts: Int32s  # [sequences] position of its first token
    tables: Int32s  # block tables, one after the other
    table_offsets: Int32s  # [sequences] where each begins
    drawn: Int32s  # tokens whose logits are wanted, in the order of the rows
    window: int  # 0: none

    def structure(self) -> Batch:
        """Valid as long as this object lives."""
        return Batch(
            num_rows=len(self.tokens),
            num_sequences=len(self.starts),
            first_rows=address(self.first_rows),
            starts=address(self.starts),
            tables=address(self.tables),
            table_offsets=address(self.table_offsets),
            window=self.window,
            is_drawn=len(self.drawn) > 0,
        )


def build_native_batch(rows: Sequence[Row], layout: KvLayout, window: int | None = None) -> NativeBatch:
    """Raises ValueError where a row lacks blocks."""
    for row in rows:
        if layout.blocks_for(row.end) > len(row.blocks):
            raise ValueError(f"row {row.request_id}: {len(row.blocks)} blocks for {row.end} tokens")
    counts = [len(row.tokens) for row in rows]
    first_rows = np.array([0, *itertools.accumulate(counts)], np.int32)
    used = [row.blocks[: layout.blocks_for(row.end)] for row in rows]
    table_ends = list(itertools.accumulate(len(table) for table in used))
    return NativeBatch(
        tokens=_flat((row.tokens for row in rows), sum(counts)),
        first_rows=first_rows,
        starts=np.array([row.start for row in rows], np.int32),
        tables=_flat(used, table_ends[-1] if table_ends else 0),
        table_offsets=np.array([0, *table_ends[:-1]], np.int32),
        drawn=np.array([first_rows[i + 1] - 1 for i, row in enumerate(rows) if row.draw], np.int32),
        window=window or 0,
    )


def _flat(parts: Iterable[Sequence[int]], count: int) -> Int32s:
    return np.fromiter(itertools.chain.from_iterable(parts), np.int32, count)
