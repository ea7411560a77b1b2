"""Copies in runs: what is consecutive on both sides moves at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from libs.transfer.interface import Copy

Run = tuple[int, int, int]  # (their first block, our first block, count)


def runs(copies: Sequence[Copy]) -> list[Run]:
    """Joins copies that are consecutive on both sides, in their order."""
    joined: list[Run] = []
    for theirs, ours in copies:
        if joined:
            first_theirs, first_ours, count = joined[-1]
            if theirs == first_theirs + count and ours == first_ours + count:
                joined[-1] = (first_theirs, first_ours, count + 1)
                continue
        joined.append((theirs, ours, 1))
    return joined


def split(run: Run, most: int) -> Iterator[Run]:
    """The run in pieces of at most `most` blocks."""
    theirs, ours, count = run
    for start in range(0, count, most):
        yield (theirs + start, ours + start, min(most, count - start))
