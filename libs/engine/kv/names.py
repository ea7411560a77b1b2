"""Names of KV blocks: a chained SHA-256 over what a block holds.

    root      = sha256("baton.kv/1", model fingerprint, layout fingerprint, tenant)
    name[0]   = sha256(root,    tokens of block 0)
    name[i]   = sha256(name[i-1], tokens of block i)

Every part is length-prefixed (8 bytes, little endian) and token ids are 4 bytes little endian, so no two
different inputs share bytes. Equal names mean equal KV, on any machine and in any process; Python's `hash`
(salted per process) is never used.
"""

from __future__ import annotations

import array
import hashlib
import struct
import sys
from collections.abc import Sequence

NAME_BYTES = 32
_VERSION = b"baton.kv/1"


def root_name(model_fingerprint: str, layout_fingerprint: str, tenant: str) -> bytes:
    """The parent of every first block. A tenant's blocks share no name with another tenant's."""
    return _digest(_VERSION, model_fingerprint.encode(), layout_fingerprint.encode(), tenant.encode())


def child_name(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Name of the full block that holds `tokens` (ids below 2**32) behind the block named `parent`."""
    ids = array.array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return _digest(parent, ids.tobytes())


def block_names(root: bytes, tokens: Sequence[int], block_size: int) -> tuple[bytes, ...]:
    """Names of all full blocks of `tokens`, in order; a partly filled last block has none."""
    names: list[bytes] = []
    parent = root
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = child_name(parent, tokens[start : start + block_size])
        names.append(parent)
    return tuple(names)


def _digest(*parts: bytes) -> bytes:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(struct.pack("<Q", len(part)))
        hasher.update(part)
    return hasher.digest()
