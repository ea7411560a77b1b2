"""The best that any cache could do with the same requests in the same order: one that forgets nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class InfiniteCache:
    """Every chain ever seen. As chains come whole, a block that is there has all blocks before it there."""

    def __init__(self) -> None:
        self._names: set[bytes] = set()

    def serve(self, names: Sequence[bytes], published: Sequence[bytes], most_blocks: int) -> int:
        """Leading blocks of a prompt that were there, at most `most_blocks`; `published` are there from now on."""
        hit = self._run(names)
        self._names.update(published[min(hit, len(published)) :])
        return min(hit, most_blocks)

    def _run(self, names: Sequence[bytes]) -> int:
        return bisect_left(names, True, key=lambda name: name not in self._names)
