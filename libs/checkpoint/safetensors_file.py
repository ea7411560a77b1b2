"""safetensors files: the table of tensors, checked against the file, and tensors as float32.

header length u64 | header: JSON, name -> dtype, shape, data_offsets | data
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from libs.checkpoint.errors import CheckpointError, UnsupportedModel

SUPPORTED = ("F32", "F16", "BF16")
MAX_HEADER_BYTES = 100_000_000  # the limit of the format
_LENGTH_BYTES = 8
_DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file; `start` and `end` are bytes from the start of the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_table(path: Path) -> dict[str, StoredTensor]:
    """All tensors of the file at `path`. Raises CheckpointError where it is damaged or has another size."""
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if file_bytes < _LENGTH_BYTES or header_bytes > min(file_bytes - _LENGTH_BYTES, MAX_HEADER_BYTES):
                raise CheckpointError(
                    path,
                    f"damaged or cut short: a header of {header_bytes} bytes in a file of {file_bytes} bytes",
                )
            raw = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
    table = _decode(path, raw, _LENGTH_BYTES + header_bytes)
    _check_extents(path, table, _LENGTH_BYTES + header_bytes, file_bytes)
    return table


def _decode(path: Path, raw: bytes, data_start: int) -> dict[str, StoredTensor]:
    table: dict[str, StoredTensor] = {}
    name = "header"
    try:
        for name, entry_json in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
            if name != "__metadata__":
                entry = msgspec.json.decode(entry_json, type=_Entry)
                start, end = (data_start + offset for offset in entry.data_offsets)
                table[name] = StoredTensor(path, name, entry.dtype, entry.shape, start, end)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(path, f"damaged: {name!r}: {error}") from error
    return table


def _check_extents(path: Path, table: dict[str, StoredTensor], data_start: int, file_bytes: int) -> None:
    """Tensors have the size that their shape needs, follow one another without holes, and fill the file."""
    position = data_start
    for tensor in sorted(table.values(), key=lambda tensor: (tensor.start, tensor.end)):
        if min(tensor.shape, default=0) < 0 or tensor.start != position or tensor.end < tensor.start:
            raise CheckpointError(path, f"damaged: {tensor.name!r} does not start where the last tensor ends")
        width = _DTYPE_BYTES.get(tensor.dtype)
        if width is not None and tensor.end - tensor.start != math.prod(tensor.shape) * width:
            raise CheckpointError(
                path,
                f"damaged: {tensor.name!r} has {tensor.end - tensor.start} bytes, not what its shape needs",
            )
        position = tensor.end
    if position != file_bytes:
        raise CheckpointError(
            path, f"damaged or cut short: its header describes {position} bytes, the file has {file_bytes}"
        )


def check_dtype(tensor: StoredTensor) -> None:
    """Raise UnsupportedModel, naming the tensor, unless it can become float32."""
    if tensor.dtype not in SUPPORTED:
        raise UnsupportedModel(
            tensor.path,
            f"tensor {tensor.name!r} has dtype {tensor.dtype}; supported are {', '.join(SUPPORTED)}",
        )


def read_tensor(tensor: StoredTensor) -> NDArray[np.float32]:
    """The tensor as fresh float32 of `tensor.shape`."""
    raw = _read(tensor, tensor.start, tensor.end - tensor.start)
    if tensor.dtype == "F32":
        return np.frombuffer(raw, "<f4").reshape(tensor.shape)
    if tensor.dtype == "F16":
        return np.frombuffer(raw, "<f2").astype(np.float32).reshape(tensor.shape)
    # bfloat16 is the upper half of a float32
    bits = np.frombuffer(raw, "<u2").astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32).reshape(tensor.shape)


def read_rows(tensor: StoredTensor, rows: range) -> NDArray[np.uint8]:
    """Consecutive rows of a matrix as they are in the file, [rows, bytes of a row]."""
    row_bytes = (tensor.end - tensor.start) // tensor.shape[0]
    raw = _read(tensor, tensor.start + rows.start * row_bytes, len(rows) * row_bytes)
    return np.frombuffer(raw, np.uint8).reshape(len(rows), row_bytes)


def _read(tensor: StoredTensor, start: int, size: int) -> bytearray:
    """`size` bytes from `start` of the file, within the tensor."""
    try:
        with tensor.path.open("rb") as file:
            file.seek(start)
            raw = bytearray(file.read(size))
    except OSError as error:
        raise CheckpointError(tensor.path, f"cannot be read: {error.strerror}") from error
    if len(raw) != size:
        raise CheckpointError(tensor.path, f"was cut short while in use, in tensor {tensor.name!r}")
    return raw
