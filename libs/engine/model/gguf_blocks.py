"""The quantised types of GGUF, block by block, in the common form of `groups`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.engine.model.groups import Bytes, Floats, Groups, nibbles
from libs.kernels.native.formats import GROUP, Format


def read_groups(type_name: str, rows: Bytes) -> Groups:
    """Rows of a quantised GGUF type, [rows, bytes of a row], in the format that `FORMAT_OF_TYPE` names.

    Nothing is lost but the last bit of Q5_K's mins: f16 scales stay f16, products of two small scales fit float32.
    """
    return _READERS[type_name](rows)


def _blocks(rows: Bytes, block_bytes: int) -> Bytes:
    return rows.reshape(len(rows), -1, block_bytes)


def _half(blocks: Bytes, start: int) -> NDArray[np.float16]:
    """The f16 at byte `start` of each block, [rows, blocks, 1]."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)


def _read_q4_0(rows: Bytes) -> Groups:
    """scale f16, 16 bytes of nibbles; a weight is scale * (q - 8). Times 8 is exact in f16 (up to a scale of 8188)."""
    blocks = _blocks(rows, 18)
    scales = _half(blocks, 0)
    return Groups(blocks[..., 2:], scales, (scales * np.float16(-8))[..., 0])


def _read_q4_1(rows: Bytes) -> Groups:
    """scale f16, min f16, 16 bytes of nibbles"""
    blocks = _blocks(rows, 20)
    return Groups(blocks[..., 4:], _half(blocks, 0), _half(blocks, 2)[..., 0])


def _read_q8_0(rows: Bytes) -> Groups:
    """scale f16, 32 signed bytes; flipping the sign bit adds 128"""
    blocks = _blocks(rows, 34)
    return Groups(blocks[..., 2:] ^ np.uint8(0x80), _half(blocks, 0))


def _read_q4_k(rows: Bytes) -> Groups:
    """scale of scales f16, scale of mins f16, 12 bytes of 6-bit scales and mins, 4 x 32 bytes of nibbles: a byte's low
    nibble belongs to one group, its high nibble to the next."""
    blocks = _blocks(rows, 144)
    scales, mins = _k_scales(blocks)
    return Groups(nibbles(_k_nibbles(blocks[..., 16:])), scales, mins)


def _read_q5_k(rows: Bytes) -> Groups:
    """As Q4_K, with 32 bytes before the nibbles: bit g of byte i is the fifth bit of weight i of group g. 0..31 is kept
    as -16..15, so the min is larger by 16 scales."""
    blocks = _blocks(rows, 176)
    scales, mins = _k_scales(blocks)
    bits = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[..., None, 16:48] >> bits) & np.uint8(1)
    q = _k_nibbles(blocks[..., 48:])
    q |= fifth.reshape(q.shape) << 4
    q += np.uint8(128 - 16)
    return Groups(q, scales, mins + np.float32(16) * scales[..., 0])


def _read_q6_k(rows: Bytes) -> Groups:
    """128 bytes of low nibbles, 64 bytes of upper bit pairs, 16 signed scales (one for 16 weights), their scale f16.

    Each half of the block is 128 weights in 4 rows of 32: the nibbles are low of bytes 0..31, low of 32..63, then high
    of both; the pairs are bits 0-1, 2-3, 4-5, 6-7 of its 32 bytes. 0..63 is kept as -32..31.
    """
    blocks = _blocks(rows, 210)
    shape = blocks.shape[:2]
    low = blocks[..., :128].reshape(*shape, 2, 1, 2, GROUP)
    shifts = np.array([0, 4], np.uint8)[:, None, None]
    q = ((low >> shifts) & np.uint8(15)).reshape(*shape, 2, 4, GROUP)
    pairs = blocks[..., 128:192].reshape(*shape, 2, 1, GROUP)
    q |= ((pairs >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & np.uint8(3)) << 4
    q += np.uint8(128 - 32)
    scales: Floats = blocks[..., 192:208].view(np.int8).astype(np.float32)
    scales *= _half(blocks, 208)
    return Groups(q.reshape(len(rows), -1, GROUP), scales.reshape(len(rows), -1, 2))


def _k_nibbles(packed: Bytes) -> Bytes:
    """[rows, blocks, 128] -> 0..15, [rows, groups, 32]"""
    pairs = packed.reshape(*packed.shape[:2], 4, 1, GROUP)
    return ((pairs >> np.array([0, 4], np.uint8)[:, None]) & np.uint8(15)).reshape(len(packed), -1, GROUP)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales [rows, groups, 1] and mins [rows, groups] of Q4_K and Q5_K blocks.

    Of groups 0..3, bytes 0..3 hold the scales and 4..7 the mins, 6 bits each. Of groups 4..7, bytes 8..11 hold the low
    four bits (scales below, mins above), and the top bits of bytes 0..7 the upper two.
    """
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    six = np.uint8(0x3F)
    upper = (third & np.uint8(15)) | ((first >> 2) & np.uint8(0x30))
    scales = np.concatenate([first & six, upper], -1)
    upper = (third >> 4) | ((second >> 2) & np.uint8(0x30))
    mins = np.concatenate([second & six, upper], -1)
    by = _half(blocks, 0).astype(np.float32)
    min_by = _half(blocks, 2).astype(np.float32)
    return (by * scales).reshape(len(blocks), -1, 1), (-min_by * mins).reshape(len(blocks), -1)


_READERS: Final[Mapping[str, Callable[[Bytes], Groups]]] = MappingProxyType(
    {
        "Q4_0": _read_q4_0,
        "Q4_1": _read_q4_1,
        "Q8_0": _read_q8_0,
        "Q4_K": _read_q4_k,
        "Q5_K": _read_q5_k,
        "Q6_K": _read_q6_k,
    }
)
FORMAT_OF_TYPE: Final[Mapping[str, Format]] = MappingProxyType(
    {
        "Q4_0": Format.Q4_F16,
        "Q4_1": Format.Q4_F16,
        "Q8_0": Format.Q8_F16,
        "Q4_K": Format.Q4_F32,
        "Q5_K": Format.Q8_F32_MIN,
        "Q6_K": Format.Q8X2_F32,
        "F32": Format.F32,
        "F16": Format.F16,
        "BF16": Format.BF16,
    }
)
