"""Checkpoints as `transformers` reads them: the same weights, and rotary frequencies, from the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from libs.checkpoint.config import RopeScaling
from libs.checkpoint.open import Checkpoint, open_checkpoint, resolve_model
from libs.checkpoint.parameters import parameters
from libs.checkpoint.rope import rope_frequencies
from tests.checkpoints import tiny_model, write_gguf, write_hf
from tests.reference import embedded_reference, load_reference

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def weights_of(model: Any, checkpoint: Checkpoint) -> dict[str, NDArray[np.float32]]:
    """The model's weights by canonical name; asserts that it has no other."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if checkpoint.config.tied_head:
        state.pop("lm_head.weight", None)
    by_name = {p.name: state.pop(p.hf_name) for p in parameters(checkpoint.config)}
    assert not state
    return by_name


def assert_same(checkpoint: Checkpoint, model: Any) -> None:
    weights = weights_of(model, checkpoint)
    assert set(weights) == set(checkpoint.tensor_names)
    for name, values in weights.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values, err_msg=name)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_folder(tmp_path: Path, architecture: str) -> None:
    folder = write_hf(tiny_model(architecture), tmp_path / "tiny", shards=2, dtype="bfloat16")
    model, report = load_reference(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert_same(open_checkpoint(folder), model)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("quant", ["F32", "Q4_0"])
def test_gguf(tmp_path: Path, architecture: str, quant: str) -> None:
    """transformers undoes the permutation of llama's q and k on its own."""
    # transformers takes no head size from a Qwen3 file but its default
    changes = {"head_dim": 128} if architecture == "qwen3" else {}
    path = write_gguf(tiny_model(architecture, **changes), tmp_path / "tiny.gguf", quant=quant)
    assert_same(open_checkpoint(path), load_reference(tmp_path, gguf_file=path.name))


@pytest.mark.parametrize("rope_key", ["rope_type", "type", "rope_parameters"])
@pytest.mark.parametrize(
    "scaling", [None, RopeScaling("linear", 4.0), RopeScaling("llama3", 8.0, 1.0, 4.0, 256)]
)
def test_rope(tmp_path: Path, rope_key: str, scaling: RopeScaling | None) -> None:
    """transformers computes in float32: equal to its rounding."""
    folder = write_hf(
        tiny_model(rope_scaling=scaling, rope_theta=5e5, head_dim=64), tmp_path / "tiny", rope_key=rope_key
    )
    expected = load_reference(folder).model.rotary_emb.inv_freq.numpy()
    np.testing.assert_allclose(rope_frequencies(open_checkpoint(folder).config), expected, rtol=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("window", [None, 64])
def test_config_fields(tmp_path: Path, architecture: str, window: int | None) -> None:
    from transformers import AutoConfig

    folder = write_hf(tiny_model(architecture, sliding_window=window), tmp_path / "tiny")
    ours = open_checkpoint(folder).config
    theirs = AutoConfig.from_pretrained(folder)
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.head_dim == getattr(theirs, "head_dim", ours.hidden_size // ours.num_heads)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.model
def test_embedded_model() -> None:
    """All 135M weights, bit for bit."""
    checkpoint = open_checkpoint(resolve_model("smollm2"))
    model = embedded_reference()
    assert_same(checkpoint, model)
    expected = model.model.rotary_emb.inv_freq.numpy()
    np.testing.assert_allclose(rope_frequencies(checkpoint.config), expected, rtol=1e-6)
