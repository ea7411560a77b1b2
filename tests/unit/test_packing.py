"""Packing for the native kernels: the layout, weight by weight, and the values against gguf's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import quants
from numpy.typing import NDArray

from libs.engine.model.gguf_blocks import FORMAT_OF_TYPE
from libs.engine.model.packing import PackedMatrix, format_of, pack_floats, pack_rows, piece_rows, unpack
from libs.kernels.native.formats import FLOAT_BYTES, QUANTISED, Format, Record, matrix_bytes

ROOT = Path(__file__).parents[2]
Floats = NDArray[np.float32]
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}  # bytes


def random_blocks(type_name: str, n: int, k: int, seed: int = 0) -> NDArray[np.uint8]:
    """Every bit pattern of numbers and small scales; the f16 scales are finite and of both signs."""
    random = np.random.default_rng(seed)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    blocks = random.integers(0, 256, (n, k // block_size, block_bytes), dtype=np.uint8)
    for place in HALVES[type_name]:
        halves = random.standard_normal((n, k // block_size, 1)).astype(np.float16)
        blocks[..., place : place + 2] = halves.view(np.uint8)
    return blocks.reshape(n, -1)


def random_floats(n: int, k: int) -> Floats:
    return np.random.default_rng(1).standard_normal((n, k)).astype(np.float32)


def packed(records: NDArray[np.uint8], format: Format, n: int, k: int) -> PackedMatrix:
    assert records.nbytes == matrix_bytes(format, n, k) and records.shape[1] % 64 == 0
    return PackedMatrix(format, n, k, records.reshape(-1))


def weight_at(matrix: PackedMatrix, row: int, k: int) -> float:
    """One weight, read as the description in `formats` says, number by number."""
    bits, scales, scale_bytes, has_min = {
        Format.Q4_F16: (4, 1, 2, True), Format.Q4_F32: (4, 1, 4, True), Format.Q8_F16: (8, 1, 2, False),
        Format.Q8_F32: (8, 1, 4, False), Format.Q8_F32_MIN: (8, 1, 4, True), Format.Q8X2_F32: (8, 2, 4, False),
    }[matrix.format]  # fmt: skip
    groups = matrix.k // 32
    sizes = [groups * bits * 64, groups * scales * 16 * scale_bytes, groups * has_min * 16 * scale_bytes]
    record_bytes = -(-sum(sizes) // 64) * 64
    record = matrix.data[row // 16 * record_bytes :][:record_bytes].tobytes()
    group, within, lane = k // 32, k % 32, row % 16
    if bits == 4:
        byte = record[group * 256 + within % 16 // 4 * 64 + lane * 4 + within % 4]
        q = byte & 15 if within < 16 else byte >> 4
    else:
        q = record[group * 512 + within // 4 * 64 + lane * 4 + within % 4] - 128
    dtype = "<f2" if scale_bytes == 2 else "<f4"
    scale_index = (group * scales + within * scales // 32) * 16 + lane
    weight = q * float(np.frombuffer(record, dtype, 1, sizes[0] + scale_index * scale_bytes)[0])
    if has_min:
        offset = sum(sizes[:2]) + (group * 16 + lane) * scale_bytes
        weight += float(np.frombuffer(record, dtype, 1, offset)[0])
    return weight


@pytest.mark.parametrize("type_name", HALVES)
def test_layout_of_quantised_formats(type_name: str) -> None:
    n, k = 19, 512
    blocks = random_blocks(type_name, n, k)
    format = format_of(type_name, k)
    matrix = packed(pack_rows(type_name, blocks, format), format, n, k)
    expected = getattr(quants, type_name).dequantize_rows(blocks)
    for row in range(n):
        for column in [*range(40), *range(40, k, 7)]:
            assert weight_at(matrix, row, column) == pytest.approx(expected[row, column], rel=1e-5, abs=1e-3)


@pytest.mark.parametrize("format", FLOAT_BYTES)
def test_layout_of_float_formats(format: Format) -> None:
    n, k = 21, 7  # an odd number of halves: records are padded
    values = np.round(random_floats(n, k) * 8)  # exact in every format
    matrix = packed(pack_floats(values, format), format, n, k)
    record_bytes = matrix.num_bytes // 2
    for row in range(n):
        for column in range(k):
            number = matrix.data[row // 16 * record_bytes :].tobytes()
            place = (column * 16 + row % 16) * FLOAT_BYTES[format]
            stored = number[place : place + FLOAT_BYTES[format]]
            if format is Format.BF16:
                stored = b"\0\0" + stored
            dtype = "<f2" if format is Format.F16 else "<f4"
            assert np.frombuffer(stored, dtype)[0] == values[row, column]


@pytest.mark.parametrize("n", [1, 16, 100])
@pytest.mark.parametrize("type_name", HALVES)
def test_values_are_those_of_gguf(type_name: str, n: int) -> None:
    for seed in range(4):
        blocks = random_blocks(type_name, n, 768, seed)
        expected = getattr(quants, type_name).dequantize_rows(blocks)
        format = format_of(type_name, 768)
        values = unpack(packed(pack_rows(type_name, blocks, format), format, n, 768))
        if type_name == "Q5_K":  # its min is rounded once more
            largest = np.abs(expected.reshape(n, -1, 32)).max(-1, keepdims=True)
            error = np.abs(values - expected).reshape(n, -1, 32)
            assert np.all(error <= 2**-21 * np.maximum(largest, 1))
        else:
            np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("type_name", HALVES)
def test_pieces_make_the_whole(type_name: str) -> None:
    n, k = 16 * 5 + 3, 256
    blocks, format = random_blocks(type_name, n, k), format_of(type_name, k)
    pieces = [pack_rows(type_name, blocks[start : start + 32], format) for start in range(0, n, 32)]
    np.testing.assert_array_equal(np.concatenate(pieces), pack_rows(type_name, blocks, format))


@pytest.mark.parametrize("type_name", FORMAT_OF_TYPE)
def test_missing_rows_are_zeros(type_name: str) -> None:
    n, k = 5, 256
    format = format_of(type_name, k)
    rows = (
        random_floats(n, k).astype(np.float16 if type_name != "F32" else np.float32).view(np.uint8)
        if format in FLOAT_BYTES
        else random_blocks(type_name, n, k)
    )
    tile = unpack(packed(pack_rows(type_name, rows, format), format, 16, k))
    assert np.all(tile[:n].any(axis=1))
    assert not tile[n:].any()


@pytest.mark.parametrize("k", [1, 31, 64, 77])
@pytest.mark.parametrize("format", FLOAT_BYTES)
def test_floats_keep_their_bits(format: Format, k: int) -> None:
    values = random_floats(33, k)
    values[0, 0], values[1, 0], values[2, 0] = np.inf, -0.0, 1e-40
    if format is Format.F16:
        values = values.astype(np.float16).astype(np.float32)
    if format is Format.BF16:
        values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    matrix = packed(pack_floats(values, format), format, 33, k)
    assert unpack(matrix).tobytes() == values.tobytes()


def test_bfloat16_rounds_to_nearest_even() -> None:
    bits = np.array([[0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF]], np.uint32)
    matrix = packed(pack_floats(bits.view(np.float32), Format.BF16), Format.BF16, 1, 4)
    rounded = unpack(matrix).view(np.uint32) >> 16
    assert rounded.tolist() == [[0x3F80, 0x3F82, 0x3F81, 0x3F80]]


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_int8(type_name: str) -> None:
    """Half a step is the largest error; the largest weight of a group comes back, and a group of zeros."""
    n, k = 40, 96
    values = random_floats(n, k)
    values[3, 32:64] = 0
    rows = gguf.quantize(values, gguf.GGMLQuantizationType[type_name]).view(np.uint8)
    stored = gguf.dequantize(rows, gguf.GGMLQuantizationType[type_name])
    assert format_of(type_name, k, int8=True) is Format.Q8_F32
    matrix = packed(pack_rows(type_name, rows, Format.Q8_F32), Format.Q8_F32, n, k)
    groups, found = stored.reshape(n, -1, 32), unpack(matrix).reshape(n, -1, 32)
    largest = np.abs(groups).max(-1)
    assert np.all(np.abs(found - groups) <= largest[..., None] / 127 * 0.501)
    np.testing.assert_allclose(np.abs(found).max(-1), largest, rtol=1e-6)
    assert not found[3, 1].any()


@pytest.mark.parametrize("format", QUANTISED)
def test_rounding_floats_to_a_format(format: Format) -> None:
    """The error is at most half a step, and what the number format of scale and min adds."""
    n, k = 33, 128
    values = random_floats(n, k) + np.float32(0.25)
    matrix = packed(pack_floats(values, format), format, n, k)
    traits = QUANTISED[format]
    groups = values.reshape(n, -1, 32 // traits.scales)
    if traits.has_min:
        step = (groups.max(-1) - groups.min(-1)) / (15 if traits.bits == 4 else 255)
    else:
        step = np.abs(groups).max(-1) / 127
    error = np.abs(unpack(matrix).reshape(groups.shape) - groups)
    rounding = np.abs(groups).max(-1) * 2**-10 if traits.scale_type == np.float16 else step * 0.01
    assert np.all(error <= (step / 2 + rounding)[..., None])
    assert error.max() > step.min() / 4  # it was rounded


@pytest.mark.parametrize("format", QUANTISED)
def test_extreme_groups(format: Format) -> None:
    """Constant, tiny and broken groups: what was not finite is not finite, and spoils no other group."""
    values = np.ones((16, 32 * 6), np.float32)
    values[:, 32:64] = 0
    values[:, 64:96] = 1e-42
    values[:, 96] = np.nan
    values[:, 128] = np.inf
    found = unpack(packed(pack_floats(values, format), format, 16, 32 * 6))
    for group in (0, 5):
        np.testing.assert_allclose(found[:, group * 32 :][:, :32], 1, rtol=1e-3)
    assert not found[:, 32:64].any()
    assert np.all(np.abs(found[:, 64:96]) < 1e-38)
    for broken in (96, 128):
        assert not np.isfinite(found[:, broken]).any()


def test_which_format() -> None:
    assert {name: format_of(name, 256) for name in FORMAT_OF_TYPE} == dict(FORMAT_OF_TYPE)
    for name, format in FORMAT_OF_TYPE.items():  # int8 is for floats, and for whole groups
        assert format_of(name, 256, int8=True) is (Format.Q8_F32 if format in FLOAT_BYTES else format)
    assert format_of("F16", 80, int8=True) is Format.F16
    with pytest.raises(KeyError):
        format_of("IQ2_XS", 256)


def test_records() -> None:
    for format in QUANTISED:
        with pytest.raises(ValueError, match=f"{format.name} cannot hold rows of 48 weights"):
            Record.of(format, 48)
    for format in Format:
        with pytest.raises(ValueError, match="rows of 0 weights"):
            Record.of(format, 0)
    assert Record.of(Format.Q4_F16, 64) == Record(512, 512 + 64, 512 + 128, 640)
    assert Record.of(Format.Q8_F16, 32) == Record(512, 544, 544, 576)
    assert Record.of(Format.Q8X2_F32, 32) == Record(512, 640, 640, 640)
    assert Record.of(Format.BF16, 3) == Record(96, 96, 96, 128)
    for k in (1, 576, 4096, 128256, 1 << 21):
        assert piece_rows(k) >= 16 and piece_rows(k) % 16 == 0
        assert piece_rows(k) == 16 or piece_rows(k) * k <= 1 << 20


def test_needs_no_torch() -> None:
    modules = "libs.engine.model.packed", "libs.engine.model.packing", "libs.kernels.native.formats"
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules or 'gguf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0
