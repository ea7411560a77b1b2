"""Least recently used first."""

from __future__ import annotations

from libs.store.order import Entry, RankedOrder


class Lru(RankedOrder):
    """A use of a chain is a use of all its objects, so the tails of chains that nobody continues go first."""

    def used(self, entry: Entry) -> None:
        """The time of use is the rank: nothing to do."""

    def rank(self, entry: Entry) -> float:
        return entry.used_s
