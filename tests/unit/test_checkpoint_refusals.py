"""What Baton does not run is refused by name before weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from libs.checkpoint.open import CheckpointError, UnsupportedModel, open_checkpoint
from tests.checkpoints import tiny_model, write_gguf, write_hf

GGUF_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"llama__expert_count": 8}, r"mixture of experts"),
    ({"split__count": 3}, r"split GGUF"),
    ({"llama__attention__value_length": 8}, r"llama\.attention\.value_length other than the head size 16"),
    ({"llama__rope__scaling__type": "yarn"}, r"rope scaling 'yarn'"),
    ({"llama__rope__scaling__type": "banana"}, r"rope scaling 'banana'"),
]
HF_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mixtral"}, r"architecture 'mixtral'"),
    ({"model_type": "gemma2"}, r"architecture 'gemma2'"),
    ({"architectures": ["LlamaForSequenceClassification"]}, r"LlamaForSequenceClassification"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rope scaling 'yarn'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope scaling 'dynamic'"),
    ({"rope_parameters": {"rope_type": "longrope"}, "rope_scaling": None}, r"rope scaling 'longrope'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"rope parameters per kind of layer"),
    ({"quantization_config": {"quant_method": "awq"}}, r"quant_method 'awq'"),
    ({"attention_bias": True}, r"attention_bias"),
    ({"mlp_bias": True}, r"mlp_bias"),
    ({"hidden_act": "gelu"}, r"hidden_act 'gelu'"),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor"),
]
HF_DAMAGE: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": "64"}, r"hidden_size"),
    ({"hidden_size": None}, r"hidden_size"),
    ({"num_hidden_layers": 2**62}, r"num_layers is 4611686018427387904"),
    ({"num_hidden_layers": 2**29}, r"tensors for 536870912 layers"),
    ({"num_hidden_layers": 3}, r"tensor 'model\.layers\.2\.input_layernorm\.weight' is missing"),
    ({"num_attention_heads": 0}, r"num_heads is 0"),
    ({"num_attention_heads": -4}, r"num_heads is -4"),
    ({"num_key_value_heads": 3}, r"4 attention heads cannot share 3"),
    ({"head_dim": 15}, r"head_dim is 15"),
    ({"vocab_size": 319}, r"shape \[320, 64\], but config\.json says \[319, 64\]"),
    ({"model_type": "mistral", "architectures": None, "sliding_window": 0}, r"sliding_window is 0"),
    ({"rms_norm_eps": 0.0}, r"rms_norm_eps"),
    ({"rope_theta": -1.0}, r"rope_theta"),
    ({"rope_scaling": {"rope_type": "linear"}}, r"factor is None"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"low_freq_factor is None"),
]


@pytest.mark.parametrize(("metadata", "message"), GGUF_REFUSALS)
def test_gguf_features(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    path = write_gguf(tiny_model(), tmp_path / "tiny.gguf", **metadata)
    with pytest.raises(UnsupportedModel, match=rf"tiny\.gguf: .*{message}"):
        open_checkpoint(path)


@pytest.mark.parametrize("architecture", ["gemma2", "qwen2moe", "llama4", "gpt-oss"])
def test_gguf_architecture_before_tensor_types(tmp_path: Path, architecture: str) -> None:
    """The name that helps is the architecture's, even where a tensor's type is unknown as well."""
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", architecture)
    writer.add_tensor("x", np.zeros((1, 17), np.uint8), raw_dtype=gguf.GGMLQuantizationType.MXFP4)
    _finish(writer)
    with pytest.raises(UnsupportedModel, match=rf"other\.gguf: architecture '{architecture}'"):
        open_checkpoint(tmp_path / "other.gguf")


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("type_id", "name"), [(10, "Q2_K"), (6, "Q5_0"), (4, r"4 \(unknown\)"), (999, r"999 \(unknown\)")]
)
def test_gguf_tensor_type(tmp_path: Path, type_id: int, name: str) -> None:
    path = write_gguf(tiny_model(), tmp_path / "tiny.gguf")
    content = bytearray(path.read_bytes())
    key = b"blk.1.ffn_up.weight"
    at = content.index(key) + len(key) + 4 + 2 * 8
    content[at : at + 4] = type_id.to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(
        UnsupportedModel, match=rf"'blk\.1\.ffn_up\.weight' has type {name}; supported are F32"
    ):
        open_checkpoint(path)


def test_gguf_tensor_without_a_place(tmp_path: Path) -> None:
    """A bias that would be left out changes the output: say so."""
    path = write_gguf(tiny_model("qwen2"), tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_q.bias", b"blk.1.attn_x.bias"))
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.1\.attn_q\.bias' is missing"):
        open_checkpoint(path)
    path.write_bytes(path.read_bytes().replace(b"qwen2", b"llama"))
    with pytest.raises(UnsupportedModel, match=r"tensor 'blk\.0\.attn_k\.bias' has no place"):
        open_checkpoint(path)


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv"])
def test_gguf_tokenizer(tmp_path: Path, model: str) -> None:
    path = write_gguf(tiny_model(), tmp_path / "tiny.gguf")
    content = path.read_bytes()
    old = len(b"gpt2").to_bytes(8, "little") + b"gpt2"
    assert content.count(old) == 1
    new = len(model).to_bytes(8, "little") + model.encode()
    at = content.index(old)
    head, tail = content[:at] + new, content[at + len(old) :]
    data_start = _data_start(path)
    shift = len(new) - len(old)
    padded = -(-(data_start + shift) // 32) * 32  # the head grew or shrank, so its padding does too
    header, data = tail[: data_start - at - len(old)], tail[data_start - at - len(old) :]
    path.write_bytes((head + header)[:padded].ljust(padded, b"\0") + data)
    with pytest.raises(UnsupportedModel, match=rf"tokenizer '{model}'"):
        open_checkpoint(path)


def _data_start(path: Path) -> int:
    return int(gguf.GGUFReader(path).data_offset)


@pytest.mark.parametrize(("changes", "message"), HF_REFUSALS)
def test_hf_features(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_hf(tiny_model(), tmp_path / "tiny")
    _edit(folder / "config.json", changes)
    (folder / "model.safetensors").unlink()  # refused before weights are looked at
    with pytest.raises(UnsupportedModel, match=rf"config\.json: .*{message}"):
        open_checkpoint(folder)


@pytest.mark.parametrize(("changes", "message"), HF_DAMAGE)
def test_hf_values(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_hf(tiny_model(), tmp_path / "tiny")
    _edit(folder / "config.json", changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert not isinstance(caught.value, UnsupportedModel)


def _edit(path: Path, changes: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        {
            "use_sliding_window": True,
            "sliding_window": 64,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ],
)
def test_window_in_some_layers(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write_hf(tiny_model("qwen3"), tmp_path / "tiny")
    _edit(folder / "config.json", changes)
    with pytest.raises(UnsupportedModel, match="some layers only"):
        open_checkpoint(folder)


def test_hf_folder_without_what_it_needs(tmp_path: Path) -> None:
    folder = write_hf(tiny_model(), tmp_path / "tiny")
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json: is missing"):
        open_checkpoint(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin: is a pickle"):
        open_checkpoint(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json, and 0 GGUF files"):
        open_checkpoint(folder)


def test_hf_dtype(tmp_path: Path) -> None:
    folder = write_hf(tiny_model(), tmp_path / "tiny", dtype="float64")
    with pytest.raises(UnsupportedModel, match=r"'model\.embed_tokens\.weight' has dtype F64"):
        open_checkpoint(folder)
