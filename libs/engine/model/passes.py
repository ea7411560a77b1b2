"""A step cut into forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from libs.engine.plan import Row

MAX_TOKENS = 512  # of one forward pass: bounds its memory; more gains no speed


def split_rows(rows: Sequence[Row], max_tokens: int = MAX_TOKENS) -> Iterator[list[Row]]:
    """Cut a step into passes of at most `max_tokens`, in order; only the last part of a row draws."""
    batch: list[Row] = []
    room = max_tokens
    for row in rows:
        while len(row.tokens) > room:
            head = replace(row, tokens=row.tokens[:room], draw=None)
            row = replace(row, tokens=row.tokens[room:], start=row.start + room)
            yield [*batch, head] if room else batch
            batch, room = [], max_tokens
        batch.append(row)
        room -= len(row.tokens)
    if batch:
        yield batch
