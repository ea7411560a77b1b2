"""Why blocks that were here once are not any more. Bounded: what was forgotten was never seen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from libs.store.key import block_key

MAX_REMEMBERED: Final = 131_072
NEVER_SEEN: Final = "never seen"


class Misses:
    """By block key (the name's first bytes); the newest reason counts."""

    def __init__(self, capacity: int = MAX_REMEMBERED) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[bytes, str] = OrderedDict()

    def note(self, keys: Iterable[bytes], reason: str) -> None:
        for key in keys:
            self._reasons[key] = reason
            self._reasons.move_to_end(key)
        while len(self._reasons) > self._capacity:
            self._reasons.popitem(last=False)

    def why(self, name: bytes) -> str:
        """For a block that nobody holds."""
        return self._reasons.get(block_key(name), NEVER_SEEN)
