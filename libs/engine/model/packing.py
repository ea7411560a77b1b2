"""Weights packed for the native kernels, and unpacked again. See `libs.kernels.native.formats` for the layout.

Rows of a checkpoint go in as they are stored, a few thousand at a time; records of 16 rows come out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.engine.model.gguf_blocks import FORMAT_OF_TYPE, read_groups
from libs.engine.model.groups import Bytes, Floats, Groups, quantise
from libs.kernels.native.formats import (
    FLOAT_BYTES,
    GROUP,
    QUANTISED,
    TILE,
    Format,
    Record,
    align,
    matrix_bytes,
)

_PIECE_WEIGHTS: Final = 1 << 20  # packed at a time: a few MB, which stay near the core


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A matrix [n, k]. `data` is flat, read-only and aligned to 64 bytes; `num_bytes` of it."""

    format: Format
    n: int
    k: int
    data: Bytes

    @property
    def num_bytes(self) -> int:
        return matrix_bytes(self.format, self.n, self.k)


def format_of(type_name: str, k: int, *, int8: bool = False) -> Format:
    """How a matrix that is stored as `type_name` is packed; `int8` quantises floats whose k is whole groups."""
    format = FORMAT_OF_TYPE[type_name]
    return Format.Q8_F32 if int8 and format in FLOAT_BYTES and k % GROUP == 0 else format


def piece_rows(k: int) -> int:
    """How many rows are well packed at a time, whole tiles."""
    return max(1, _PIECE_WEIGHTS // (k * TILE)) * TILE


def pack_rows(type_name: str, rows: Bytes, format: Format) -> Bytes:
    """Pack rows as they are stored, [rows, bytes of a row]; `format` is what `format_of` gave. Returns [tiles, record].

    Missing rows of the last tile are zeros.
    """
    if rows.shape[0] % TILE:  # zero bytes are zeros in every type
        rows = np.concatenate([rows, np.zeros((-len(rows) % TILE, rows.shape[1]), np.uint8)])
    if FORMAT_OF_TYPE[type_name] in QUANTISED:
        return _pack_groups(read_groups(type_name, rows), format)
    if format in QUANTISED:
        return _pack_groups(quantise(_to_float32(type_name, rows), format), format)
    return _pack_numbers(rows.view(_number_type(format)))


def pack_floats(values: Floats, format: Format) -> Bytes:
    """Pack float32 rows [rows, k] in any format, rounding to nearest; any k for the float formats."""
    if format in QUANTISED:
        padded = np.zeros((len(values) + -len(values) % TILE, values.shape[1]), np.float32)
        padded[: len(values)] = values
        return _pack_groups(quantise(padded, format), format)
    rounded = _to_bfloat16(values) if format is Format.BF16 else values.astype(_FLOAT_TYPES[format])
    return pack_rows(format.name, rounded.view(np.uint8), format)


def unpack(matrix: PackedMatrix) -> Floats:
    """The weights, [n, k]: what they were before packing, or what their quantised type makes of them."""
    record = Record.of(matrix.format, matrix.k)
    records = matrix.data[: matrix.num_bytes].reshape(-1, record.num_bytes)
    if matrix.format in QUANTISED:
        values = _unpack_groups(records, matrix.format, matrix.k)
    else:
        numbers = records[:, : record.scales_at].view(_number_type(matrix.format))
        rows = np.ascontiguousarray(numbers.reshape(-1, matrix.k, TILE).swapaxes(1, 2)).reshape(-1, matrix.k)
        values = _to_float32(matrix.format.name, rows.view(np.uint8))
    return values[: matrix.n]


def _pack_groups(groups: Groups, format: Format) -> Bytes:
    """Rows are whole tiles."""
    rows, num_groups, _ = groups.data.shape
    records = _new_records(rows // TILE, format, num_groups * GROUP)
    data, scales, mins = _fields(records, format, num_groups)
    # Four bytes of a row stay together: they move as one number.
    words = np.ascontiguousarray(groups.data).view(np.uint32)
    data[...] = words.reshape(-1, TILE, num_groups, data.shape[2]).transpose(0, 2, 3, 1)
    scales[...] = groups.scales.reshape(-1, TILE, num_groups, scales.shape[2]).transpose(0, 2, 3, 1)
    if groups.mins is not None:
        mins[...] = groups.mins.reshape(-1, TILE, num_groups).swapaxes(1, 2)
    return records


def _pack_numbers(numbers: NDArray[np.unsignedinteger]) -> Bytes:
    """Float formats, as bits: [rows, k], rows whole tiles."""
    tiles, k = len(numbers) // TILE, numbers.shape[1]
    size = k * TILE * numbers.itemsize
    records = np.zeros((tiles, align(size)), np.uint8)
    cells = records[:, :size].view(numbers.dtype).reshape(tiles, k, TILE)
    cells[...] = numbers.reshape(tiles, TILE, k).swapaxes(1, 2)
    return records


def _new_records(tiles: int, format: Format, k: int) -> Bytes:
    return np.zeros((tiles, Record.of(format, k).num_bytes), np.uint8)


def _fields(
    records: Bytes, format: Format, num_groups: int
) -> tuple[NDArray[np.uint32], NDArray[np.floating], NDArray[np.floating]]:
    """Views of the parts of records: data [tile, group, chunk, 16], scales [tile, group, 1 or 2, 16], mins
    [tile, group, 16] (empty where the format has none)."""
    traits, record = QUANTISED[format], Record.of(format, num_groups * GROUP)
    data = records[:, : record.scales_at].view(np.uint32)
    scales = records[:, record.scales_at : record.mins_at].view(traits.scale_type)
    mins = records[:, record.mins_at : record.mins_end].view(traits.scale_type)
    return (
        data.reshape(len(records), num_groups, -1, TILE),
        scales.reshape(len(records), num_groups, -1, TILE),
        mins.reshape(len(records), -1, TILE),
    )


def _unpack_groups(records: Bytes, format: Format, k: int) -> Floats:
    data, scales, mins = _fields(records, format, k // GROUP)
    # [tile, row, group, bytes]
    packed = np.ascontiguousarray(data.transpose(0, 3, 1, 2)).view(np.uint8)
    if QUANTISED[format].bits == 4:
        q = np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], -1).astype(np.float32)
    else:
        q = packed.astype(np.float32) - np.float32(128)
    parts = q.reshape(*q.shape[:3], scales.shape[2], -1)
    with np.errstate(invalid="ignore"):  # broken scales give broken weights
        values = parts * scales.transpose(0, 3, 1, 2).astype(np.float32)[..., None]
        if mins.size:
            values += mins.swapaxes(1, 2).astype(np.float32)[..., None, None]
    return values.reshape(-1, k)


def _number_type(format: Format) -> type[np.unsignedinteger]:
    return np.uint32 if FLOAT_BYTES[format] == 4 else np.uint16


def _to_float32(type_name: str, rows: Bytes) -> Floats:
    """[rows, bytes of a row] -> [rows, k]"""
    if type_name == "BF16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return rows.view(_FLOAT_TYPES[Format[type_name]]).astype(np.float32, copy=False)


def _to_bfloat16(values: Floats) -> NDArray[np.uint16]:
    """Round to nearest, ties to even. For finite values."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)


_FLOAT_TYPES: Final = {Format.F32: np.float32, Format.F16: np.float16}
