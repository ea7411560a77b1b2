"""Which object holds which block, and which consecutive blocks of a prompt it covers.

    keys      b"k0 k1 k2 ..."         of a prompt, one behind the other
    where     k0 -> entry             one object for each block; others that hold it too, if any, are in `others`
    Span      entry, first, start, count

    prompt    0 1 2 3 4 5 6 7 8 9
    entry           0 1 2 3 4            covers 2 to 6: Span(entry, first=0, start=2, num_blocks=5)

An object is found by one look at its first block there; the rest is a comparison of bytes. So a prompt costs a
dictionary's cache misses once for each object, not for each block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from libs.store.key import KEY_BYTES
from libs.store.order import Entry


class Span(NamedTuple):
    """Blocks `first ...` of an object are blocks `start ...` of a prompt, `num_blocks` of them."""

    entry: Entry
    first: int
    start: int
    num_blocks: int


class BlockMap:
    """From blocks' keys to objects. A block may be in several."""

    def __init__(self) -> None:
        self._where: dict[bytes, Entry] = {}
        self._others: dict[bytes, list[Entry]] = {}

    def add(self, entry: Entry, keys: Sequence[bytes]) -> None:
        """`keys`: those of `entry.keys`, one by one."""
        where = self._where
        for key in dict.fromkeys(keys):  # only a forged object holds a block twice
            if where.setdefault(key, entry) is not entry:
                self._others.setdefault(key, []).append(entry)

    def remove(self, entry: Entry) -> None:
        for key in dict.fromkeys(each_key(entry.keys)):
            others = self._others.get(key)
            if others is None:
                self._where.pop(key, None)
                continue
            if self._where[key] is entry:
                self._where[key] = others.pop()
            else:
                others.remove(entry)
            if not others:
                del self._others[key]

    def get(self, key: bytes) -> Entry | None:
        """An object that holds the block."""
        return self._where.get(key)

    def run(self, names: Sequence[bytes]) -> int:
        """How many of `names` are covered: the blocks of `cover`, and twice as fast."""
        keys = _keys(names)
        where, at = self._where, 0
        while (entry := where.get(keys[at : at + KEY_BYTES])) is not None:
            if keys.startswith(entry.keys, at):  # nearly always
                at += len(entry.keys)
            else:
                at += KEY_BYTES * _span(entry, keys, at).num_blocks
        return at // KEY_BYTES

    def cover(self, names: Sequence[bytes]) -> Iterator[Span]:
        """Spans of consecutive `names` from the first on, as long as their blocks are in some object."""
        keys = _keys(names)
        where, others, at = self._where, self._others, 0
        while (entry := where.get(key := keys[at : at + KEY_BYTES])) is not None:
            if key not in others and keys.startswith(entry.keys, at):  # nearly always
                span = Span(entry, 0, at // KEY_BYTES, len(entry.keys) // KEY_BYTES)
            else:
                spans = [_span(each, keys, at) for each in (entry, *others.get(key, ()))]
                span = max(spans, key=_length)
            yield span
            at += span.num_blocks * KEY_BYTES


def each_key(keys: bytes) -> Iterator[bytes]:
    """Single keys out of several, one behind the other."""
    for at in range(0, len(keys), KEY_BYTES):
        yield keys[at : at + KEY_BYTES]


def index_of(key: bytes, keys: bytes) -> int:
    """Position of a key among keys that it is one of."""
    at = keys.find(key)
    while at % KEY_BYTES:  # found across two others
        at = keys.index(key, at + 1)
    return at // KEY_BYTES


def _keys(names: Sequence[bytes]) -> bytes:
    return b"".join([name[:KEY_BYTES] for name in names])


def _length(span: Span) -> int:
    return span.num_blocks


def _span(entry: Entry, keys: bytes, at: int) -> Span:
    """What `entry`, which holds the block whose key is at byte `at` of `keys`, covers from there on."""
    first = index_of(keys[at : at + KEY_BYTES], entry.keys)
    wanted, held = each_key(keys[at : at + len(entry.keys)]), each_key(entry.keys[first * KEY_BYTES :])
    num_blocks = 0
    for ours, theirs in zip(wanted, held, strict=False):
        if ours != theirs:
            break
        num_blocks += 1
    return Span(entry, first, at // KEY_BYTES, num_blocks)
