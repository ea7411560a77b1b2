"""Tensors as they are stored: same rows, same order as the float32 ones, in any pieces."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from libs.checkpoint.open import Checkpoint, CheckpointError, open_checkpoint
from libs.checkpoint.raw import RawTensor
from tests.checkpoints import tiny_model, write_gguf, write_hf


def dequantised(raw: RawTensor) -> NDArray[np.float32]:
    return gguf.dequantize(raw.data, gguf.GGMLQuantizationType[raw.type_name])


def matrices(checkpoint: Checkpoint) -> list[str]:
    return [name for name in checkpoint.tensor_names if len(checkpoint.stored(name).shape) == 2]


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # rows of q and k interleaved, and not
def test_gguf_blocks(tmp_path: Path, quant: str, architecture: str) -> None:
    checkpoint = open_checkpoint(write_gguf(tiny_model(architecture), tmp_path / "tiny.gguf", quant=quant))
    assert len(matrices(checkpoint)) == 2 + 7 * 2
    for name in matrices(checkpoint):
        raw, values = checkpoint.raw(name), checkpoint.tensor(name)
        assert raw.type_name == quant == checkpoint.stored(name).type_name
        assert raw.shape == values.shape == checkpoint.stored(name).shape
        np.testing.assert_array_equal(dequantised(raw), values, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_safetensors_bytes(tmp_path: Path, dtype: str) -> None:
    checkpoint = open_checkpoint(write_hf(tiny_model(), tmp_path / "tiny", dtype=dtype))
    for name in matrices(checkpoint):
        np.testing.assert_array_equal(
            dequantised(checkpoint.raw(name)), checkpoint.tensor(name), err_msg=name
        )


@pytest.mark.parametrize("step", [1, 3, 16, 40])
def test_rows_in_pieces(tmp_path: Path, step: int) -> None:
    """A head of q has 16 rows: pieces end within heads, where reordering reads beyond them."""
    model = tiny_model()
    checkpoints = (
        open_checkpoint(write_gguf(model, tmp_path / "tiny.gguf", quant="Q4_1")),
        open_checkpoint(write_hf(model, tmp_path / "tiny")),
    )
    for checkpoint in checkpoints:
        for name in ("layers.1.q.weight", "layers.0.k.weight", "layers.0.down.weight"):
            whole = checkpoint.raw(name)
            pieces = [
                checkpoint.raw(name, range(start, min(start + step, whole.shape[0])))
                for start in range(0, whole.shape[0], step)
            ]
            assert pieces[0].shape == (min(step, whole.shape[0]), whole.shape[1])
            np.testing.assert_array_equal(np.concatenate([piece.data for piece in pieces]), whole.data)
            assert checkpoint.raw(name, range(2, 2)).data.size == 0


def test_rows_that_are_not_there(tmp_path: Path) -> None:
    for checkpoint in (
        open_checkpoint(write_gguf(tiny_model(), tmp_path / "tiny.gguf")),
        open_checkpoint(write_hf(tiny_model(), tmp_path / "tiny")),
    ):
        for rows in (range(0, 65), range(-1, 4), range(0, 4, 2), range(5, 4)):
            with pytest.raises(ValueError, match=r"'layers\.0\.q\.weight' of shape \[64, 64\] has no rows"):
                checkpoint.raw("layers.0.q.weight", rows)
        with pytest.raises(ValueError, match=r"'norm\.weight'"):
            checkpoint.raw("norm.weight")
        for read in (checkpoint.raw, checkpoint.stored):
            with pytest.raises(KeyError):
                read("layers.9.q.weight")


def test_file_cut_short_while_in_use(tmp_path: Path) -> None:
    file = write_gguf(tiny_model(), tmp_path / "tiny.gguf", quant="Q8_0")
    folder = write_hf(tiny_model(), tmp_path / "tiny")
    for checkpoint, weights in (
        (open_checkpoint(file), file),
        (open_checkpoint(folder), folder / "model.safetensors"),
    ):
        with weights.open("r+b") as opened:
            opened.truncate(weights.stat().st_size // 2)
        with pytest.raises(CheckpointError, match="cut short while in use"):
            for name in matrices(checkpoint):
                checkpoint.raw(name)
