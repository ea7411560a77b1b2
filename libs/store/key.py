"""Keys of objects: paths that say which blocks are inside, so that a listing is an index.

    <namespace>/<tenant>/<shard>/<stem>
        namespace   16 hex digits: model and layout
        tenant      16 hex digits
        shard       first two characters of the last block's base32: 1024 folders, so that none grows too large
        stem        base32 of the parent's key, then of each block's key in order: 16 characters each

A block's key is the first 80 bits of its name: short enough that 14 of them are one file name (255 bytes at most), long
enough that two of 10**9 blocks collide once in a million stores. Readers check the full name in the object's header.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from dataclasses import dataclass
from typing import Final, Self

KEY_BYTES: Final = 10
_OBJECTS: Final = b"baton.object/1"  # with the version of header.py
MAX_BLOCKS: Final = 14
_CHARS: Final = 16  # base32 of KEY_BYTES, without padding
_TAG_CHARS: Final = 16
_TAG: Final = re.compile(rf"[0-9a-f]{{{_TAG_CHARS}}}")
_PATH: Final = re.compile(
    rf"(?P<namespace>{_TAG.pattern})/(?P<tenant>{_TAG.pattern})/(?P<shard>[a-z2-7]{{2}})"
    rf"/(?P<stem>(?:[a-z2-7]{{{_CHARS}}}){{2,{MAX_BLOCKS + 1}}})"
)
# int() reads base 32 as 0-9a-v, nine times as fast as base64.b32decode: a listing has a million of these.
_DIGITS: Final = str.maketrans("abcdefghijklmnopqrstuvwxyz234567", "0123456789abcdefghijklmnopqrstuv")


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """What a path says. `parent`: key of the block before the first, for a prompt's first block of its root.

    `blocks`: 1 to MAX_BLOCKS keys, in order. Raises ValueError for parts that no path could hold.
    """

    namespace: str
    tenant: str
    parent: bytes
    blocks: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if not (_TAG.fullmatch(self.namespace) and _TAG.fullmatch(self.tenant)):
            raise ValueError(f"namespace {self.namespace!r} and tenant {self.tenant!r}: each 16 hex digits")
        if not 1 <= len(self.blocks) <= MAX_BLOCKS:
            raise ValueError(f"an object has 1 to {MAX_BLOCKS} blocks, not {len(self.blocks)}")
        if len(self.parent) != KEY_BYTES or {*map(len, self.blocks)} != {KEY_BYTES}:
            raise ValueError(f"keys of blocks have {KEY_BYTES} bytes")

    def path(self) -> str:
        stem = base64.b32encode(self.parent + b"".join(self.blocks)).decode().lower()
        return f"{self.namespace}/{self.tenant}/{_shard(stem)}/{stem}"

    @classmethod
    def parse(cls, path: str) -> Self:
        """The inverse of `path`. Raises ValueError for everything that `path` never returns."""
        found = _PATH.fullmatch(path)
        if found is None or found["shard"] != _shard(found["stem"]):
            raise ValueError(f"{path[:300]!r} is no key of an object")
        stem = found["stem"]
        keys = int(stem.translate(_DIGITS), 32).to_bytes(len(stem) // _CHARS * KEY_BYTES, "big")
        parent, *blocks = (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
        return cls(found["namespace"], found["tenant"], parent, tuple(blocks))


def is_key(path: str) -> bool:
    """If `ObjectKey.parse` takes it. Such a path has four parts and none of them leads elsewhere."""
    found = _PATH.fullmatch(path)
    return found is not None and found["shard"] == _shard(found["stem"])


def block_key(name: bytes) -> bytes:
    """Key of the block of this name (`libs.engine.kv.names`)."""
    return name[:KEY_BYTES]


def namespace_digest(model_fingerprint: str, layout_fingerprint: str) -> bytes:
    """32 bytes that two workers share if their blocks may be exchanged. Parts are length-prefixed as in names.

    Versions of the object format have folders of their own: two that share a store never read each other's objects.
    """
    hasher = hashlib.sha256()
    for part in (_OBJECTS, model_fingerprint.encode(), layout_fingerprint.encode()):
        hasher.update(struct.pack("<Q", len(part)))
        hasher.update(part)
    return hasher.digest()


def namespace(model_fingerprint: str, layout_fingerprint: str) -> str:
    """First folder of all objects of this model and layout."""
    return namespace_digest(model_fingerprint, layout_fingerprint).hex()[:_TAG_CHARS]


def tenant_tag(tenant: str) -> str:
    """Second folder. A digest, because a tenant's name may hold any character."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:_TAG_CHARS]


def _shard(stem: str) -> str:
    return stem[-_CHARS:][:2]
