"""The header of an object: what is in it, said in full. Everything is little endian.

    | magic 8 | version u32 | header bytes u32 | count u32 | block size u32 | block bytes u64 |
    | namespace 32 | parent 32 |
    | name 32 | tokens: block size * u32 | digest 16 |    for each block
    | digest 16 |                                         of all header bytes before it
    | zeros up to a multiple of 4096 |                    not checked; then the blocks, block bytes each

Digests are xxh3_128 in its canonical byte order. They find damage, not forgery: who may write to the store is trusted.
"""

from __future__ import annotations

import array
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import xxhash

from libs.engine.kv.names import NAME_BYTES

MAGIC: Final = b"BATONKV\0"
VERSION: Final = 1
ALIGN: Final = 4096
DIGEST_BYTES: Final = 16
_FIXED: Final = struct.Struct("<8sIIIIQ32s32s")
_START: Final = struct.Struct("<8sI")
_TOKEN_BYTES: Final = 4


class BadHeader(Exception):
    """Bytes that are no header of this version. `reason`: version, foreign or header, as in ObjectDamaged."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Entry:
    """One block. `tokens`: block size ids as `pack_tokens` writes them; `digest`: of the block's bytes."""

    name: bytes
    tokens: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class Header:
    """Of an object of `len(entries)` blocks, `block_bytes` each. `parent`: full name of the block before them."""

    namespace: bytes
    block_size: int
    block_bytes: int
    parent: bytes
    entries: tuple[Entry, ...]

    def pack(self) -> bytes:
        """The header with its padding."""
        count = len(self.entries)
        num_bytes = header_bytes(count, self.block_size)
        sizes = (num_bytes, count, self.block_size, self.block_bytes)
        fixed = _FIXED.pack(MAGIC, VERSION, *sizes, self.namespace, self.parent)
        body = fixed + b"".join(each.name + each.tokens + each.digest for each in self.entries)
        packed = body + digest(body)
        if len(packed) != num_bytes or {len(self.namespace), len(self.parent)} != {NAME_BYTES}:
            raise ValueError(
                f"a header of {len(packed)} bytes where {num_bytes} were to be: a part has a wrong size"
            )
        return packed.ljust(padded(num_bytes), b"\0")

    @classmethod
    def unpack(cls, raw: bytes | bytearray | memoryview) -> Self:
        """The header at the start of `raw`. Raises BadHeader; "foreign" if it goes on behind the end of `raw`."""
        raw = memoryview(raw)
        num_bytes, count, block_size = header_sizes(raw)
        if num_bytes > len(raw):
            raise BadHeader("foreign", f"its header has {num_bytes} bytes, {len(raw)} were expected at most")
        body, end = raw[: num_bytes - DIGEST_BYTES], raw[num_bytes - DIGEST_BYTES : num_bytes]
        if digest(body) != end:
            raise BadHeader("header", "the checksum of its header is wrong")
        *_, block_bytes, space, parent = _FIXED.unpack_from(raw)
        step = _entry_bytes(block_size)
        starts = range(_FIXED.size, _FIXED.size + count * step, step)
        entries = tuple(_entry(bytes(body[start : start + step])) for start in starts)
        return cls(space, block_size, block_bytes, parent, entries)


def header_sizes(raw: memoryview) -> tuple[int, int, int]:
    """Bytes without padding, blocks, tokens of a block; from the first bytes of an object. Raises BadHeader."""
    if len(raw) < _FIXED.size:
        raise BadHeader("header", f"its header has only {len(raw)} bytes")
    magic, version = _START.unpack_from(raw)
    if magic != MAGIC:
        raise BadHeader("header", "it does not begin as an object does")
    if version != VERSION:
        raise BadHeader("version", f"it has version {version}; this program reads version {VERSION}")
    _, _, num_bytes, count, block_size, *_ = _FIXED.unpack_from(raw)
    if num_bytes != header_bytes(count, block_size):
        raise BadHeader(
            "header", f"sizes in its header do not fit: {num_bytes} bytes, {count} * {block_size} tokens"
        )
    return num_bytes, count, block_size


def header_bytes(count: int, block_size: int) -> int:
    """Of the header of `count` blocks of `block_size` tokens, without padding."""
    return _FIXED.size + count * _entry_bytes(block_size) + DIGEST_BYTES


def padded(num_bytes: int) -> int:
    """Where the blocks begin behind a header of so many bytes."""
    return -(-num_bytes // ALIGN) * ALIGN


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """4 bytes each. Raises OverflowError for an id outside 0 ... 2**32 - 1."""
    ids = array.array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    ids = array.array("I", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """16 bytes. Long data is read with the interpreter's lock released."""
    return xxhash.xxh3_128_digest(data)


def _entry_bytes(block_size: int) -> int:
    return NAME_BYTES + block_size * _TOKEN_BYTES + DIGEST_BYTES


def _entry(raw: bytes) -> Entry:
    return Entry(raw[:NAME_BYTES], raw[NAME_BYTES:-DIGEST_BYTES], raw[-DIGEST_BYTES:])
