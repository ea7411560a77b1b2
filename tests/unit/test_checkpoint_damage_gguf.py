"""Damaged GGUF files: a CheckpointError that names the file, never a traceback or a large allocation."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from libs.checkpoint.gguf_file import read_header
from libs.checkpoint.gguf_types import check_tensors
from libs.checkpoint.open import CheckpointError, open_checkpoint
from tests.checkpoints import tiny_model, write_gguf
from tests.unit.checkpoint_damage import NUM_ROUNDS, SEED, bounded_memory, open_and_read

EXTREMES = (0, 1, 2**31 - 1, 2**32 - 1, 2**32, 2**62, 2**63, 2**64 - 16, 2**64 - 1)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A tiny file (quantised, so that block sizes matter), and where its data starts."""
    model = tiny_model("llama", num_layers=1)
    path = write_gguf(model, tmp_path_factory.mktemp("gguf") / "tiny.gguf", quant="Q8_0")
    return path.read_bytes(), read_header(path).data_start


def test_gguf_short_of_one_byte(tmp_path: Path, gguf_bytes: tuple[bytes, int]) -> None:
    content, _ = gguf_bytes
    path = tmp_path / "cut.gguf"
    path.write_bytes(content)
    assert open_and_read(path) is None
    path.write_bytes(content[:-1])
    with pytest.raises(
        CheckpointError, match=r"cut\.gguf: .*cut short: tensor 'output\.weight' ends at byte"
    ):
        open_checkpoint(path)


def test_gguf_truncations(tmp_path: Path, gguf_bytes: tuple[bytes, int]) -> None:
    content, data_start = gguf_bytes
    lengths = {
        *range(0, 64),
        *random.Random(SEED).sample(range(len(content)), NUM_ROUNDS // 2),
        data_start - 1,
        data_start,
    }
    path = tmp_path / "cut.gguf"
    with bounded_memory():
        for length in sorted(lengths):
            path.write_bytes(content[:length])
            assert open_and_read(path) is not None, f"opened with {length} of {len(content)} bytes"


def test_gguf_flipped_bytes(tmp_path: Path, gguf_bytes: tuple[bytes, int]) -> None:
    """Any byte of the head may be wrong: the file opens (a letter in a token) or is refused by name."""
    content, data_start = gguf_bytes
    source = random.Random(SEED)
    path = tmp_path / "flipped.gguf"
    outcomes = set()
    with bounded_memory():
        for _ in range(NUM_ROUNDS):
            damaged = bytearray(content)
            for _ in range(source.choice((1, 1, 1, 4))):
                damaged[source.randrange(data_start)] ^= 1 << source.randrange(8)
            path.write_bytes(damaged)
            outcomes.add(open_and_read(path) is None)
    assert outcomes == {True, False}


def test_gguf_extreme_integers(tmp_path: Path, gguf_bytes: tuple[bytes, int]) -> None:
    """Counts, lengths, dimensions and offsets of any size, wherever they stand in the head."""
    content, data_start = gguf_bytes
    source = random.Random(SEED)
    tensors_at = content.index(b"token_embd.weight")
    places = [4, 8, 16, 24, *source.sample(range(24, data_start - 8), NUM_ROUNDS // 6)]
    places += source.sample(range(tensors_at, data_start - 8), NUM_ROUNDS // 6)
    path = tmp_path / "extreme.gguf"
    with bounded_memory():
        for place in places:
            for value in source.sample(EXTREMES, 2):
                path.write_bytes(content[:place] + struct.pack("<Q", value) + content[place + 8 :])
                open_and_read(path)


def test_gguf_size_that_wraps(tmp_path: Path) -> None:
    """4 * (2^30 - 1) * (2^30 + 1) floats are 2^64 - 16 bytes: 0 after padding, in 64-bit arithmetic."""
    shape = (2**30 + 1, 2**30 - 1, 4)
    path = tmp_path / "wraps.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    size = 4 * 4 * (2**30 - 1) * (2**30 + 1)
    assert size == 2**64 - 16 and -(-size // 32) * 32 % 2**64 == 0
    writer.add_tensor_info("token_embd.weight", shape, np.dtype(np.float32), 0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:
        file.write(bytes(64))
    header = read_header(path)
    assert header.tensors["token_embd.weight"].shape == shape
    with pytest.raises(CheckpointError, match=rf"wraps\.gguf: .*ends at byte {header.data_start + size}"):
        check_tensors(header)


def _patch(content: bytes, after: bytes, skip: int, new: bytes) -> bytes:
    at = content.index(after) + len(after) + skip
    return content[:at] + new + content[at + len(new) :]


GGUF_CASES: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("magic", lambda c: b"GGML" + c[4:], "is not a GGUF file"),
    ("empty", lambda c: b"", "is empty"),
    ("version", lambda c: _patch(c, b"GGUF", 0, struct.pack("<I", 1)), "version 1"),
    ("endian", lambda c: _patch(c, b"GGUF", 0, struct.pack(">I", 3)), "big-endian"),
    (
        "tensors",
        lambda c: _patch(c, b"GGUF", 4, struct.pack("<Q", 2**63)),
        "claims 9223372036854775808 tensors",
    ),
    ("pairs", lambda c: _patch(c, b"GGUF", 12, struct.pack("<Q", 2**60)), "metadata entries"),
    (
        "array",
        lambda c: _patch(c, b"ggml.tokens", 8, struct.pack("<Q", 2**40)),
        "strings in 'tokenizer.ggml.tokens'",
    ),
    (
        "string",
        lambda c: _patch(c, b"ggml.tokens", 16, struct.pack("<Q", 2**40)),
        "entry 0 of 'tokenizer.ggml.tokens'",
    ),
    (
        "scalars",
        lambda c: _patch(c, b"token_type", 8, struct.pack("<Q", 2**40)),
        "'tokenizer.ggml.token_type' needs",
    ),
    (
        "utf8",
        lambda c: _patch(c, b"ggml.tokens", 24, b"\xff"),
        "entry 0 of 'tokenizer.ggml.tokens' is not UTF-8",
    ),
    ("value type", lambda c: _patch(c, b"eos_token_id", 0, struct.pack("<I", 77)), "unknown value type 77"),
    (
        "wrong type",
        lambda c: _patch(c, b"block_count", 0, struct.pack("<I", 6)),
        "'llama.block_count' is not an integer",
    ),
    ("eos", lambda c: _patch(c, b"eos_token_id", 4, struct.pack("<I", 300)), "outside the 300 tokens"),
    ("layers", lambda c: _patch(c, b"block_count", 4, struct.pack("<I", 2**29)), "536870912 layers"),
    (
        "layers + 1",
        lambda c: _patch(c, b"block_count", 4, struct.pack("<I", 2)),
        "'blk.1.attn_norm.weight' is missing",
    ),
    ("heads", lambda c: _patch(c, b"head_count", 4, struct.pack("<I", 0)), "num_heads is 0"),
    ("rank", lambda c: _patch(c, b"token_embd.weight", 0, struct.pack("<I", 5)), "5 dimensions"),
    ("dim 0", lambda c: _patch(c, b"token_embd.weight", 4, struct.pack("<Q", 0)), "dimension of size 0"),
    (
        "row",
        lambda c: _patch(c, b"ffn_down.weight", 4, struct.pack("<Q", 127)),
        "not a multiple of 32 as Q8_0",
    ),
    (
        "shape",
        lambda c: _patch(c, b"ffn_down.weight", 4, struct.pack("<Q", 96)),
        r"shape [64, 96], not [64, 128]",
    ),
    (
        "offset",
        lambda c: _patch(c, b"\0output.weight", 24, struct.pack("<Q", 2**64 - 32)),
        "'output.weight' ends at byte",
    ),
    ("align", lambda c: _patch(c, b"\0output.weight", 24, struct.pack("<Q", 33)), "not aligned to 32"),
    ("overlap", lambda c: _patch(c, b"\0output.weight", 24, struct.pack("<Q", 32)), "overlap"),
    (
        "twice",
        lambda c: c.replace(b"blk.0.attn_v.weight", b"blk.0.attn_k.weight"),
        "'blk.0.attn_k.weight' occurs twice",
    ),
    ("key twice", lambda c: c.replace(b"eot_token_id", b"eos_token_id"), "occurs twice"),
    ("key gone", lambda c: c.replace(b"block_count", b"block_c0unt"), "'llama.block_count' is missing"),
]


@pytest.mark.parametrize(
    ("damage", "message"), [case[1:] for case in GGUF_CASES], ids=[c[0] for c in GGUF_CASES]
)
def test_gguf_damage_is_named(
    tmp_path: Path, gguf_bytes: tuple[bytes, int], damage: Callable[[bytes], bytes], message: str
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(damage(gguf_bytes[0]))
    with bounded_memory():
        found = open_and_read(path)
    assert found is not None and str(path) in found and message in found


@pytest.mark.parametrize("value", [0, 3, 48, True, "32", 2**30])
def test_gguf_alignment(tmp_path: Path, value: Any) -> None:
    path = write_gguf(tiny_model(), tmp_path / "tiny.gguf", general__alignment=value)
    with pytest.raises(CheckpointError, match=r"general\.alignment|aligned|cut short"):
        open_checkpoint(path)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_gguf_rope_factors(tmp_path: Path, factor: float) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_model(), path, llama__rope__scaling__type="linear", llama__rope__scaling__factor=factor)
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.factor"):
        open_checkpoint(path)
