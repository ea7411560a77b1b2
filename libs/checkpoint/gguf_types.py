"""Element types of GGUF tensors: how many bytes they take, and how they become float32.

The formats themselves are `gguf`'s business; it is imported when the first tensor is read, because services
that only tokenise (the gateway) never need it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from libs.checkpoint.errors import CheckpointError, UnsupportedModel
from libs.checkpoint.gguf_file import GgufHeader, TensorInfo


@dataclass(frozen=True, slots=True)
class ElementType:
    """`block_bytes` bytes hold `block_size` consecutive elements of a row."""

    name: str
    block_size: int
    block_bytes: int


SUPPORTED: dict[int, ElementType] = {
    0: ElementType("F32", 1, 4),
    1: ElementType("F16", 1, 2),
    2: ElementType("Q4_0", 32, 18),
    3: ElementType("Q4_1", 32, 20),
    8: ElementType("Q8_0", 32, 34),
    12: ElementType("Q4_K", 256, 144),
    13: ElementType("Q5_K", 256, 176),
    14: ElementType("Q6_K", 256, 210),
    30: ElementType("BF16", 1, 2),
}

_ROWS_AT_ONCE = 1024


def check_tensors(header: GgufHeader) -> None:
    """Refuse element types that are not supported, and tensors that overlap or end behind the file."""
    extents = sorted(
        (info.offset, info.offset + num_bytes(header.path, info), info.name)
        for info in header.tensors.values()
    )
    data_bytes = header.file_bytes - header.data_start
    previous_end, previous_name = 0, ""
    for start, end, name in extents:
        if start < previous_end:
            raise CheckpointError(header.path, f"damaged: tensors {previous_name!r} and {name!r} overlap")
        if end > data_bytes:
            raise CheckpointError(
                header.path,
                f"damaged or cut short: tensor {name!r} ends at byte {header.data_start + end}, "
                f"but the file has {header.file_bytes}",
            )
        previous_end, previous_name = end, name


def num_bytes(path: Path, info: TensorInfo) -> int:
    """Size of a tensor in the file. Raises UnsupportedModel for a type that is not in `SUPPORTED`."""
    element = SUPPORTED.get(info.type_id)
    if element is None:
        known = ", ".join(element.name for element in SUPPORTED.values())
        raise UnsupportedModel(
            path, f"tensor {info.name!r} has type {_type_name(info.type_id)}; supported are {known}"
        )
    if info.shape[-1] % element.block_size:
        raise CheckpointError(
            path,
            f"damaged: rows of {info.name!r} have {info.shape[-1]} elements, "
            f"not a multiple of {element.block_size} as {element.name} needs",
        )
    return math.prod(info.shape) // element.block_size * element.block_bytes


def read_tensor(header: GgufHeader, info: TensorInfo) -> NDArray[np.float32]:
    """The tensor as fresh float32 of `info.shape`. The header has passed `check_tensors`."""
    raw = _read(header, info, 0, num_bytes(header.path, info))
    return _to_float32(raw, SUPPORTED[info.type_id].name, info.shape)


def read_rows(header: GgufHeader, info: TensorInfo, rows: range) -> NDArray[np.uint8]:
    """Consecutive rows of a matrix as they are in the file, [rows, bytes of a row]."""
    row_bytes = num_bytes(header.path, info) // info.shape[0]
    raw = _read(header, info, rows.start * row_bytes, len(rows) * row_bytes)
    return np.frombuffer(raw, np.uint8).reshape(len(rows), row_bytes)


def _read(header: GgufHeader, info: TensorInfo, offset: int, size: int) -> bytes:
    """`size` bytes of the tensor, from `offset` within it."""
    try:
        with header.path.open("rb") as file:
            file.seek(header.data_start + info.offset + offset)
            raw = file.read(size)
    except OSError as error:
        raise CheckpointError(header.path, f"cannot be read: {error.strerror}") from error
    if len(raw) != size:
        raise CheckpointError(header.path, f"was cut short while in use, in tensor {info.name!r}")
    return raw


def _to_float32(raw: bytes, type_name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    from gguf import GGMLQuantizationType, dequantize, quants

    rows = np.frombuffer(raw, np.uint8).reshape(*shape[:-1], -1)
    quantised = getattr(quants, type_name, None)
    if quantised is None or len(shape) != 2:  # F32, F16, vectors
        values: NDArray[np.float32] = dequantize(rows, GGMLQuantizationType[type_name]).reshape(shape)
        return values if values.flags.writeable else values.copy()
    # `dequantize` would go by 16 rows, which costs twice the time; all at once costs five times the memory.
    values = np.empty(shape, np.float32)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        values[part] = quantised.dequantize_rows(rows[part])
    return values


def _type_name(type_id: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return str(GGMLQuantizationType(type_id).name)
    except ValueError:
        return f"{type_id} (unknown)"
