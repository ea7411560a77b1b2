"""How packed weights lie in memory: what the packer writes and the kernels (`src/linear.h`) read.

The outputs of a matrix [n, k] go in tiles of 16, n padded with zeros. A tile is a record, all records of a matrix have
one size, padded to 64 bytes:

    quantised formats   data of all groups | scales of all groups | mins of all groups      a group is 32 of k
    float formats       [k][16 outputs]

    4-bit data, 256 bytes a group: byte [chunk c of 4][output][i of 4] holds q[4c + i] in its low and q[16 + 4c + i] in
    its high nibble. 8-bit data, 512 bytes a group: byte [chunk c of 8][output][i of 4] holds q[4c + i] + 128.
    Scales are [group][16 outputs], or [group][2][16] where each 16 of k have their own; mins are [group][16].

A weight is `scale * q + min`: q is 0..15 in 4-bit formats, signed in 8-bit formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Final

import numpy as np

TILE: Final = 16  # outputs in a record
GROUP: Final = 32  # of k that share a scale
ALIGNMENT: Final = 64  # bytes, of records and of matrices


class Format(IntEnum):
    """Values are fixed: files and kernels hold them. Behind each: what is packed that way."""

    Q4_F16 = 0  # Q4_0 (min is -8 * scale), Q4_1
    Q4_F32 = 1  # Q4_K
    Q8_F16 = 2  # Q8_0
    Q8_F32 = 3  # floats, by choice
    Q8_F32_MIN = 4  # Q5_K
    Q8X2_F32 = 5  # Q6_K
    F32 = 8
    F16 = 9
    BF16 = 10


@dataclass(frozen=True, slots=True)
class Traits:
    """What a quantised format keeps for each group of an output."""

    bits: int  # of a weight
    scales: int
    has_min: bool
    scale_type: np.dtype[np.floating]  # of mins too

    @property
    def data_bytes(self) -> int:
        """Of a group of one output."""
        return GROUP * self.bits // 8


_F16: Final = np.dtype(np.float16)
_F32: Final = np.dtype(np.float32)
QUANTISED: Final[Mapping[Format, Traits]] = MappingProxyType(
    {
        Format.Q4_F16: Traits(4, 1, True, _F16),
        Format.Q4_F32: Traits(4, 1, True, _F32),
        Format.Q8_F16: Traits(8, 1, False, _F16),
        Format.Q8_F32: Traits(8, 1, False, _F32),
        Format.Q8_F32_MIN: Traits(8, 1, True, _F32),
        Format.Q8X2_F32: Traits(8, 2, False, _F32),
    }
)
FLOAT_BYTES: Final[Mapping[Format, int]] = MappingProxyType({Format.F32: 4, Format.F16: 2, Format.BF16: 2})


@dataclass(frozen=True, slots=True)
class Record:
    """Geometry of one tile, in bytes from its start; scales and mins are empty for float formats."""

    scales_at: int
    mins_at: int
    mins_end: int
    num_bytes: int  # with padding

    @classmethod
    def of(cls, format: Format, k: int) -> Record:
        """Raises ValueError where k is not a positive number, or not whole groups in a quantised format."""
        if k < 1 or (format in QUANTISED and k % GROUP):
            raise ValueError(f"{format.name} cannot hold rows of {k} weights")
        if format in FLOAT_BYTES:
            end = k * TILE * FLOAT_BYTES[format]
            return cls(end, end, end, align(end))
        traits, cells = QUANTISED[format], k // GROUP * TILE
        scales_at = cells * traits.data_bytes
        mins_at = scales_at + cells * traits.scales * traits.scale_type.itemsize
        end = mins_at + cells * traits.has_min * traits.scale_type.itemsize
        return cls(scales_at, mins_at, end, align(end))


def num_tiles(n: int) -> int:
    """Records that hold n outputs."""
    return -(-n // TILE)


def matrix_bytes(format: Format, n: int, k: int) -> int:
    """Size of a packed matrix [n, k]. Raises ValueError as `Record.of` does."""
    return num_tiles(n) * Record.of(format, k).num_bytes


def align(num_bytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
