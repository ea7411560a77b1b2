"""Packed weights in a file that is mapped as it is.

    magic | version u32 | checksum of the table u32 | size of the file u64 | start of the table u64 | its size u64
    | zeros up to byte 4096 | parts, each aligned to 64 bytes | table: JSON, one entry for each part

The header is written last: without it, there is no packed file. Little endian.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import BinaryIO, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from libs.checkpoint.config import ModelConfig
from libs.engine.model.groups import Bytes
from libs.engine.model.packed_recipe import Part, Recipe
from libs.engine.model.packing import PackedMatrix
from libs.kernels.native.formats import align
from libs.wire.errors import BatonError

VERSION: Final = 1  # changes with the layout of weights or of the file
Progress = Callable[[int, int], None]  # bytes packed, bytes in all

_MAGIC: Final = b"batonwts"
_HEADER: Final = struct.Struct("<8sIIQQQ")
_DATA_START: Final = 4096
_SAMPLES, _SAMPLE_BYTES = 8, 512  # of each part: 4 KiB


class PackedFileError(BatonError):
    """A packed file that cannot be used: damaged, cut short, of another version or another model."""


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A model's weights, read-only. Arrays keep the mapping alive; names as in `libs.checkpoint.parameters`."""

    config: ModelConfig
    matrices: Mapping[str, PackedMatrix]  # `head.weight` is absent where it is tied to `embed.weight`
    vectors: Mapping[str, NDArray[np.float32]]  # norms and biases
    num_bytes: int  # of memory, shared or own


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    shape: tuple[int, ...]
    format: int | None
    start: int
    crc: int  # of all its bytes: compared once, right after writing
    sample: int  # `_sample` of its bytes: compared whenever the file is opened

    def holds(self, part: Part, start: int) -> bool:
        return (self.name, self.shape, self.format, self.start) == (part.name, part.shape, part.format, start)


def write_packed(file: BinaryIO, recipe: Recipe, on_progress: Progress | None = None) -> None:
    """Pack into an empty file, open for reading too; what was written is read back and compared.

    Room is reserved first, so that a full disk shows before the work. Raises OSError, PackedFileError where other
    bytes come back, and what the recipe's source raises.
    """
    starts = _starts(recipe.parts)
    table_start = starts[-1]
    _reserve(file.fileno(), table_start)
    crcs = _write_parts(file, recipe.parts, starts, on_progress)
    file.truncate(table_start)  # where nothing could be reserved, the file ends before the last padding
    file.flush()
    table = msgspec.json.encode(_read_back(file.fileno(), recipe.parts, starts, crcs))
    file.seek(table_start)
    file.write(table)
    file.seek(0)
    size = table_start + len(table)
    file.write(_HEADER.pack(_MAGIC, VERSION, zlib.crc32(table), size, table_start, len(table)))
    file.flush()


def map_packed(descriptor: int, recipe: Recipe) -> PackedModel:
    """Map a file for reading. Its length, table and a sample of every part are checked, not every byte.

    Raises PackedFileError where it is not what the recipe makes, OSError where it cannot be mapped.
    """
    size = os.fstat(descriptor).st_size
    if size < _DATA_START:
        raise PackedFileError(f"cut short: {size} bytes")
    view = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
    data = np.frombuffer(view, np.uint8)
    entries = _read_table(data)
    starts = _starts(recipe.parts)
    if len(entries) != len(recipe.parts) or starts[-1] > size:
        raise PackedFileError(
            f"holds {len(entries)} parts in {size} bytes, not {len(recipe.parts)} in {starts[-1]}"
        )
    contents = {}
    for entry, part, start in zip(entries, recipe.parts, starts, strict=False):
        if not entry.holds(part, start):
            raise PackedFileError(f"holds {entry.name!r} where {part.name!r} belongs, or in another form")
        contents[part.name] = data[start : start + part.num_bytes]
        if _sample(contents[part.name]) != entry.sample:
            raise PackedFileError(f"damaged: {part.name!r} has another checksum")
    _advise(view)
    return _model(recipe, contents, size)


def _starts(parts: Sequence[Part]) -> list[int]:
    """Where each part starts, and behind them where the table does."""
    return list(itertools.accumulate((align(part.num_bytes) for part in parts), initial=_DATA_START))


def _reserve(descriptor: int, num_bytes: int) -> None:
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot reserve
            raise


def _write_parts(
    file: BinaryIO, parts: Sequence[Part], starts: Sequence[int], on_progress: Progress | None
) -> list[int]:
    """Returns checksums of what was packed, as it was before it went to the file."""
    done, total = 0, sum(part.num_bytes for part in parts)
    crcs = []
    for part, start in zip(parts, starts, strict=False):
        file.seek(start)
        crc = 0
        for piece in part.pieces():
            content = np.ascontiguousarray(piece).data.cast("B")
            file.write(content)
            crc = zlib.crc32(content, crc)
            done += len(content)
            if on_progress is not None:
                on_progress(done, total)
        crcs.append(crc)
    return crcs


def _read_back(
    descriptor: int, parts: Sequence[Part], starts: Sequence[int], crcs: Sequence[int]
) -> list[_Entry]:
    """The table. Raises PackedFileError where the file has other bytes than went to it."""
    data = np.frombuffer(mmap.mmap(descriptor, starts[-1], mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
    entries = []
    for part, start, crc in zip(parts, starts, crcs, strict=False):
        content = data[start : start + part.num_bytes]
        if zlib.crc32(content.data) != crc:
            raise PackedFileError(f"other bytes than were written come back, in {part.name!r}")
        entries.append(_Entry(part.name, part.shape, part.format, start, crc, _sample(content)))
    return entries


def _read_table(data: Bytes) -> list[_Entry]:
    magic, version, crc, size, start, num_bytes = _HEADER.unpack_from(data.data)
    if magic != _MAGIC or version != VERSION:
        raise PackedFileError(f"not a packed file of version {VERSION}")
    if size != len(data) or start + num_bytes != size:
        raise PackedFileError(f"cut short or damaged: {len(data)} bytes instead of {size}")
    table = data[start:].tobytes()
    if zlib.crc32(table) != crc:
        raise PackedFileError("damaged: its table has another checksum")
    try:
        return msgspec.json.decode(table, type=list[_Entry])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PackedFileError(f"damaged: its table: {error}") from error


def _sample(content: Bytes) -> int:
    """Checksum of evenly spread pieces, the first and the last bytes among them."""
    last = max(0, len(content) - _SAMPLE_BYTES)
    crc = 0
    for start in np.linspace(0, last, _SAMPLES, dtype=np.int64):
        crc = zlib.crc32(content[start : start + _SAMPLE_BYTES].data, crc)
    return crc


def _advise(view: mmap.mmap) -> None:
    """Read ahead, and large pages where the file system has them: fewer misses of the address cache."""
    for name in ("MADV_WILLNEED", "MADV_HUGEPAGE"):
        if hasattr(mmap, name):
            with suppress(OSError):
                view.madvise(getattr(mmap, name))


def _model(recipe: Recipe, contents: Mapping[str, Bytes], num_bytes: int) -> PackedModel:
    matrices: dict[str, PackedMatrix] = {}
    vectors: dict[str, NDArray[np.float32]] = {}
    for part in recipe.parts:
        content = contents[part.name]
        if part.format is None:
            vectors[part.name] = content.view(np.float32)
        else:
            n, k = part.shape
            matrices[part.name] = PackedMatrix(part.format, n, k, content)
    return PackedModel(recipe.config, MappingProxyType(matrices), MappingProxyType(vectors), num_bytes)
