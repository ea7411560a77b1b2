"""What would cost least to compute again goes first: GreedyDual-Size with frequency (Cherkasova, HPL-98-69).

    rank = age + uses * compute / bytes          age: the rank of what was evicted last

An entry that is not used keeps its rank while age rises past it. Computing a token costs the same everywhere, plus
attention over all tokens before it; so blocks deep in a chain are worth more than those at its head.
"""

from __future__ import annotations

from libs.store.key import KEY_BYTES
from libs.store.order import Entry, RankedOrder

ATTENTION_BLOCKS = (
    512.0  # behind so many blocks, attention costs as much as all else: 32K tokens, an 8B model
)
MOST_USES = 4  # more of them say little about the future, and would keep the heads of ended sessions for long


class CostAware(RankedOrder):
    """GDSF over objects. The age is one for all tenants, so that a quiet tenant's objects do not age slower."""

    def __init__(self, *, attention_blocks: float = ATTENTION_BLOCKS, most_uses: int = MOST_USES) -> None:
        super().__init__()
        self._attention_blocks = attention_blocks
        self._most_uses = most_uses
        self._age = 0.0

    def added(self, entry: Entry) -> None:
        entry.rank = self._age + self._value(entry)
        super().added(entry)

    def put_back(self, entry: Entry) -> None:
        super().added(entry)  # with the rank that it has

    def used(self, entry: Entry) -> None:
        entry.rank = max(entry.rank, self._age + self._value(entry))

    def rank(self, entry: Entry) -> float:
        return entry.rank

    def removed(self, entry: Entry, *, evicted: bool) -> None:
        if evicted:
            self._age = max(self._age, entry.rank)
        super().removed(entry, evicted=evicted)

    def _value(self, entry: Entry) -> float:
        """Compute saved for each byte kept, in blocks without attention for each MiB."""
        num_blocks = len(entry.keys) // KEY_BYTES
        before = entry.first + num_blocks / 2  # of a block in its middle
        compute = num_blocks * (1 + before / self._attention_blocks)
        return min(1 + entry.uses, self._most_uses) * compute * (1 << 20) / max(1, entry.num_bytes)
