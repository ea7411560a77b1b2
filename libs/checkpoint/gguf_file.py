"""GGUF files: metadata and the table of tensors, every size checked against the file before it is used.

    magic "GGUF" | version u32 | tensor count u64 | pair count u64
    | pairs: key, type u32, value | tensors: name, rank u32, dims u64 x rank, type u32, offset u64
    | padding to `general.alignment` | data: each tensor at its offset

Python's integers do not wrap, so a crafted size cannot slip past a comparison. Strings are a u64 length and
UTF-8. Files of version 2 and 3 differ in byte order only; little endian is read.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from libs.checkpoint.errors import CheckpointError, UnsupportedModel

GgufValue: TypeAlias = "int | float | bool | str | list[str] | NDArray[np.generic]"

MAX_DIMS = 4
MAX_ARRAY_STRINGS = 1 << 24  # more than any vocabulary; bounds memory for crafted files
DEFAULT_ALIGNMENT = 32
_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_SCALARS = {  # value type: its code for struct and for numpy
    0: ("<B", "<u1"),
    1: ("<b", "<i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    7: ("<?", "<u1"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A row of the table. `shape` is numpy's (rows first), `offset` counts from the start of the data."""

    name: str
    shape: tuple[int, ...]
    type_id: int  # of ggml; see gguf_types
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All of a file but the bytes of its tensors."""

    path: Path
    metadata: dict[str, GgufValue]
    tensors: dict[str, TensorInfo]
    data_start: int  # bytes from the start of the file
    file_bytes: int


def read_header(path: Path) -> GgufHeader:
    """Parse the head of the file at `path`. Raises CheckpointError where it is damaged."""
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise CheckpointError(path, "is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _parse(_Cursor(path, view))
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error


class _Cursor:
    """Reads values one after the other; reading past the end of the file is a CheckpointError."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self.path = path
        self.view = view
        self.size = len(view)
        self.position = 0

    def error(self, reason: str) -> CheckpointError:
        return CheckpointError(self.path, reason)

    def take(self, num_bytes: int, what: str) -> bytes:
        """The next bytes. The length comes from the file, so it is compared before anything is allocated."""
        start = self.position
        end = start + num_bytes
        if end > self.size:
            raise self.error(
                f"damaged or cut short: {what} needs {num_bytes} bytes at {start}, "
                f"but the file ends at {self.size}"
            )
        self.position = end
        return self.view[start:end]

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def string(self, what: str) -> str:
        raw = self.take(self.u64(what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"damaged: {what} is not UTF-8") from error

    def check_count(self, count: int, min_bytes: int, what: str) -> None:
        """Refuse a count of entries that the rest of the file cannot hold."""
        if count * min_bytes > self.size - self.position:
            raise self.error(f"damaged or cut short: it claims {count} {what}, more than the file can hold")


def _parse(cursor: _Cursor) -> GgufHeader:
    if cursor.take(4, "the magic number") != _MAGIC:
        raise cursor.error("is not a GGUF file")
    version = cursor.u32("the version")
    if version not in (2, 3):
        if version and not version & 0xFFFF:
            raise UnsupportedModel(cursor.path, "big-endian GGUF is not supported")
        raise UnsupportedModel(cursor.path, f"GGUF version {version} is not supported, only 2 and 3")
    num_tensors, num_pairs = cursor.u64("the tensor count"), cursor.u64("the metadata count")
    cursor.check_count(num_pairs, _MIN_PAIR_BYTES, "metadata entries")
    metadata: dict[str, GgufValue] = {}
    for _ in range(num_pairs):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise cursor.error(f"damaged: metadata key {key!r} occurs twice")
        metadata[key] = _value(cursor, cursor.u32(f"the type of {key!r}"), repr(key))
    cursor.check_count(num_tensors, _MIN_TENSOR_BYTES, "tensors")
    tensors: dict[str, TensorInfo] = {}
    for _ in range(num_tensors):
        info = _tensor_info(cursor)
        if info.name in tensors:
            raise cursor.error(f"damaged: tensor {info.name!r} occurs twice")
        tensors[info.name] = info
    data_start = -(-cursor.position // (alignment := _alignment(cursor, metadata))) * alignment
    for info in tensors.values():
        if info.offset % alignment:
            raise cursor.error(
                f"damaged: offset {info.offset} of {info.name!r} is not aligned to {alignment}"
            )
    return GgufHeader(cursor.path, metadata, tensors, data_start, cursor.size)


def _value(cursor: _Cursor, type_id: int, what: str) -> GgufValue:
    if type_id == _STRING:
        return cursor.string(what)
    if type_id == _ARRAY:
        return _array(cursor, what)
    if type_id not in _SCALARS:
        raise cursor.error(f"damaged: {what} has the unknown value type {type_id}")
    code = _SCALARS[type_id][0]
    value: int | float | bool = struct.unpack(code, cursor.take(struct.calcsize(code), what))[0]
    return value


def _array(cursor: _Cursor, what: str) -> list[str] | NDArray[np.generic]:
    type_id, count = cursor.u32(what), cursor.u64(what)
    if type_id == _STRING:
        cursor.check_count(count, 8, f"strings in {what}")
        if count > MAX_ARRAY_STRINGS:
            raise cursor.error(f"{what} has {count} strings; at most {MAX_ARRAY_STRINGS} are read")
        return _strings(cursor, count, what)
    if type_id not in _SCALARS:
        raise cursor.error(f"{what} is an array of value type {type_id}, which is not supported")
    dtype = np.dtype(_SCALARS[type_id][1])
    return np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype)


def _strings(cursor: _Cursor, count: int, what: str) -> list[str]:
    """`count` strings. A vocabulary has 100,000s: this loop avoids the cursor's method calls."""
    view, size, position = cursor.view, cursor.size, cursor.position
    unpack = _U64.unpack_from
    strings: list[str] = []
    try:
        for _ in range(count):
            start = position + 8
            position = start + unpack(view, position)[0]
            if position > size:
                break
            strings.append(view[start:position].decode())
    except struct.error:
        position = size + 1
    except UnicodeDecodeError as error:
        raise cursor.error(f"damaged: entry {len(strings)} of {what} is not UTF-8") from error
    if position > size:
        raise cursor.error(f"damaged or cut short: entry {len(strings)} of {what} ends behind the file")
    cursor.position = position
    return strings


def _tensor_info(cursor: _Cursor) -> TensorInfo:
    name = cursor.string("a tensor name")
    what = f"tensor {name!r}"
    rank = cursor.u32(what)
    if not 1 <= rank <= MAX_DIMS:
        raise cursor.error(f"damaged: {what} has {rank} dimensions; 1 to {MAX_DIMS} are possible")
    dims = [cursor.u64(what) for _ in range(rank)]
    if 0 in dims:
        raise cursor.error(f"damaged: {what} has a dimension of size 0")
    return TensorInfo(name, tuple(reversed(dims)), cursor.u32(what), cursor.u64(what))


def _alignment(cursor: _Cursor, metadata: dict[str, GgufValue]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0 or value & (value - 1):
        raise cursor.error(f"damaged: general.alignment is {value!r}, not a power of two")
    return value
