"""Why blocks are missing: the newest reason, bounded."""

from __future__ import annotations

from libs.store.key import block_key
from services.cache.misses import NEVER_SEEN, Misses

NAMES = [bytes([number]) * 32 for number in range(10)]


def test_newest_reason_counts_and_strangers_were_never_seen() -> None:
    misses = Misses()
    misses.note([block_key(NAMES[0]), block_key(NAMES[1])], "evicted")
    misses.note([block_key(NAMES[0])], "checksum")
    assert [misses.why(name) for name in NAMES[:3]] == ["checksum", "evicted", NEVER_SEEN]


def test_the_oldest_are_forgotten() -> None:
    misses = Misses(capacity=3)
    for name in NAMES[:3]:
        misses.note([block_key(name)], "evicted")
    misses.note([block_key(NAMES[0])], "evicted")  # young again
    misses.note([block_key(NAMES[5])], "expired")
    assert [misses.why(NAMES[n]) for n in (0, 1, 2, 5)] == ["evicted", NEVER_SEEN, "evicted", "expired"]
