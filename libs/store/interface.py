"""Durable blocks: what a place for bytes has to do. What the bytes mean is `objects`' business.

    object     several consecutive blocks of one chain, under a header that says what they are
    key        its path in the store; it names the blocks in it, so a listing is an index of all blocks

An object is whole or does not exist, and never changes. Calls block: they run on threads, several at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from libs.wire.errors import BatonError, Code

Piece = tuple[int, memoryview]  # (offset in the object, where its bytes go: as many as the view is long)


class StoreError(BatonError):
    """The store did not do it. Blocks that were to be read are computed, ones to be written are not kept."""

    code = Code.KV_UNAVAILABLE
    retryable = True


class ObjectGone(StoreError):
    """There is no object of this key (any more)."""


class ObjectDamaged(StoreError):
    """An object that is not what its key says: short, changed, of another version, model, layout or prompt.

    `reason` is one word for counters: short, version, foreign, header, checksum.
    """

    def __init__(self, key: str, reason: str, text: str) -> None:
        super().__init__(f"object {key}: {text}")
        self.key = key
        self.reason = reason


class StoreFull(StoreError):
    """No space, or no quota, is left for what was to be written."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """As a listing tells. `used_s`: when it was last written or touched, seconds since 1970."""

    key: str
    num_bytes: int
    used_s: float


class Store(Protocol):
    """Any number of processes may use one store at once."""

    url: str
    num_unreadable: int  # folders that the last listing could not read

    def put(self, key: str, parts: Sequence[bytes | memoryview]) -> None:
        """Writes the parts, one after the other, as one object. Whoever is killed here leaves no object behind.

        An object of that key that is there already has the same content and may stay. Raises StoreFull, StoreError.
        """
        ...

    def read(self, key: str, pieces: Sequence[Piece]) -> None:
        """Fills every piece. Raises ObjectGone, ObjectDamaged ("short"), StoreError; pieces then hold unknown bytes."""
        ...

    def delete(self, key: str) -> None:
        """Idempotent. Who reads the object at this moment gets all of it, or ObjectGone. Raises StoreError."""
        ...

    def list(self) -> Iterator[list[StoredObject]]:
        """All objects, in pages, in any order. Files that are no objects are left out. Raises StoreError."""
        ...

    def remove_leftovers(self) -> int:
        """Deletes what killed processes left half written, if that is kept at all; returns how many. Never raises."""
        ...

    def touch(self, keys: Iterable[str]) -> None:
        """Notes, where that is possible, that these were used now. Never raises."""
        ...

    def close(self) -> None: ...
