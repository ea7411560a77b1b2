"""Replacing what an index knows by what a listing says, while the store goes on changing."""

from __future__ import annotations

from collections.abc import Iterable

from libs.store.order import Entry


class Scan:
    """Marks what a listing has. A listing is no moment in time: what came or went while it was read is not in doubt."""

    def __init__(self) -> None:
        self._number = 0
        self._is_open = False
        self._forgotten: set[str] = set()  # deleted while the listing is read

    def begin(self) -> None:
        self._number += 1
        self._is_open = True
        self._forgotten.clear()

    def abandon(self) -> None:
        self._is_open = False
        self._forgotten.clear()

    def end(self, entries: Iterable[Entry]) -> list[Entry]:
        """Those of `entries` that have no mark of this listing."""
        self.check_open()
        self.abandon()
        return [entry for entry in entries if entry.scan != self._number]

    def check_open(self) -> None:
        """Raises RuntimeError when no listing is being read."""
        if not self._is_open:
            raise RuntimeError("no listing is being read: begin_scan comes first")

    def mark(self, entry: Entry) -> None:
        """`entry` is there."""
        entry.scan = self._number
        self._forgotten.discard(entry.path)

    def forget(self, path: str) -> None:
        """`path` is gone: the listing may still have it."""
        if self._is_open:
            self._forgotten.add(path)

    def was_forgotten(self, path: str) -> bool:
        return path in self._forgotten
