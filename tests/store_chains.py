"""Chains of block names, and the paths of objects that hold parts of them, for tests of the store's index."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from libs.store.key import ObjectKey, block_key, namespace, tenant_tag

NAMESPACE = namespace("model", "layout")


def chain(label: str, count: int, behind: Sequence[bytes] = ()) -> list[bytes]:
    """`behind`, and `count` names that go on from there; other labels give other names."""
    names = list(behind)
    for number in range(count):
        parent = names[-1] if names else root()
        names.append(hashlib.sha256(parent + f"{label} {number}".encode()).digest())
    return names


def root() -> bytes:
    """The parent of first blocks."""
    return hashlib.sha256(b"root").digest()


def path(names: Sequence[bytes], first: int, count: int, tenant: str = "somebody") -> str:
    """Of the object that holds blocks `first ...` of a chain, `count` of them."""
    parent = names[first - 1] if first else root()
    blocks = tuple(block_key(name) for name in names[first : first + count])
    return ObjectKey(NAMESPACE, tenant_tag(tenant), block_key(parent), blocks).path()


def paths(names: Sequence[bytes], first: int = 0, size: int = 8, tenant: str = "somebody") -> list[str]:
    """Of objects of up to `size` blocks each that hold the chain from block `first` on."""
    starts = range(first, len(names), size)
    return [path(names, start, min(size, len(names) - start), tenant) for start in starts]
