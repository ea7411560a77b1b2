"""Tiny models with random weights, as Hugging Face folders and as GGUF files.

    model = tiny_model("qwen2", seed=3)
    folder = write_hf(model, tmp_path / "qwen2")            # also opens with transformers
    file = write_gguf(model, tmp_path / "qwen2.gguf")       # the same weights

Both carry the same tokenizer: byte-level BPE, 300 tokens, of which 0 to 2 are `<|endoftext|>` (BOS, never
added), `<|im_start|>` and `<|im_end|>` (EOS), and the same ChatML template. The model has 320 embeddings.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from libs.checkpoint.config import ModelConfig, RopeScaling
from libs.checkpoint.parameters import parameters
from libs.checkpoint.rope import rope_frequencies

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
NUM_TOKENS = 300
_TEXT = "the quick brown fox jumps over the lazy dog and then there is another thing that they thought of "
_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


@dataclass(frozen=True)
class TinyModel:
    """`weights` by canonical name, float32, q and k rows for rotation by halves."""

    config: ModelConfig
    weights: dict[str, NDArray[np.float32]]


def tiny_model(architecture: str = "llama", *, seed: int = 0, **changes: Any) -> TinyModel:
    """A model of 2 layers and hidden size 64; `changes` replace fields of its config."""
    config = ModelConfig(
        architecture=architecture,
        name="tiny",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32 if architecture == "qwen3" else 16,
        context_length=512,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
    )
    config = replace(config, **changes)
    random = np.random.default_rng(seed)
    return TinyModel(config, {p.name: _random(random, p.name, p.shape) for p in parameters(config)})


def _random(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Values of the scale that trained models have, so that logits differ and nothing overflows."""
    if "norm" in name:
        return random.uniform(0.5, 1.5, shape).astype(np.float32)
    scale = 0.5 if name in ("embed.weight", "head.weight") else shape[-1] ** -0.5
    return (random.standard_normal(shape) * scale).astype(np.float32)


def write_hf(
    model: TinyModel, folder: Path, *, dtype: str = "float32", shards: int = 1, rope_key: str = "rope_type"
) -> Path:
    """Write a Hugging Face folder. `dtype`: float32, float16 or bfloat16 (rounded towards zero).

    `rope_key` says how scaling is written: "rope_type", "type" (older) or "rope_parameters" (newer).
    """
    folder.mkdir(parents=True)
    _write_json(folder / "config.json", _hf_config(model.config, rope_key))
    _write_json(folder / "generation_config.json", {"eos_token_id": [EOS_ID, 0]})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "bos_token": SPECIAL_TOKENS[0],
        "added_tokens_decoder": {
            str(index): {"content": token, "special": True} for index, token in enumerate(SPECIAL_TOKENS)
        },
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    tokenizer().save(str(folder / "tokenizer.json"))
    tensors = {p.hf_name: model.weights[p.name] for p in parameters(model.config)}
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        part = dict(list(tensors.items())[shard::shards])
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(folder / name, part, dtype)
        weight_map |= dict.fromkeys(part, name)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder


def write_safetensors(path: Path, tensors: dict[str, NDArray[np.float32]], dtype: str = "float32") -> None:
    """Write one file with the safetensors library."""
    encoded = {name: _encode(values, dtype) for name, values in tensors.items()}  # alive until written
    specs = {
        name: safetensors.TensorSpec(
            dtype=dtype, shape=values.shape, data_ptr=values.ctypes.data, data_len=values.nbytes
        )
        for name, values in encoded.items()
    }
    safetensors.serialize_file(specs, str(path), {"format": "pt"})


def write_gguf(model: TinyModel, path: Path, *, quant: str = "F32", **metadata: Any) -> Path:
    """Write a GGUF file. `quant`: F32, F16, BF16, Q8_0, Q4_0 or Q4_1, for matrices. `metadata` is added to it."""
    config = model.config
    arch = "llama" if config.architecture == "mistral" else config.architecture
    writer = gguf.GGUFWriter(path, arch)
    _add_config(writer, config)
    _add_tokenizer(writer)
    for key, value in metadata.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    for parameter in parameters(config):
        values = model.weights[parameter.name]
        if arch == "llama" and parameter.rope_heads is not None:
            values = halves_to_interleaved(values, parameter.rope_heads)
        kind = gguf.GGMLQuantizationType[quant if values.ndim == 2 else "F32"]
        writer.add_tensor(parameter.gguf_name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def halves_to_interleaved(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Row order of llama models in GGUF: rotary pair i of a head in rows (2i, 2i + 1)."""
    half = rows.shape[0] // num_heads // 2
    order = [
        head * 2 * half + pair + side * half
        for head in range(num_heads)
        for pair in range(half)
        for side in range(2)
    ]
    return rows[order]


@cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE of `NUM_TOKENS` tokens; the first three are special."""
    result = Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    result.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    result.train_from_iterator([_TEXT], trainer)
    assert result.get_vocab_size() == NUM_TOKENS
    return result


def _hf_config(config: ModelConfig, rope_key: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "architectures": [f"{_CLASSES[config.architecture]}ForCausalLM"],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": 0,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
    }
    if config.architecture != "llama":
        fields["sliding_window"] = config.sliding_window
    if config.architecture.startswith("qwen"):
        fields |= {"use_sliding_window": config.sliding_window is not None, "max_window_layers": 0}
    scaling = None if config.rope_scaling is None else _hf_scaling(config.rope_scaling)
    if rope_key == "rope_parameters":
        theta = {"rope_theta": config.rope_theta}
        return fields | {"rope_parameters": {"rope_type": "default", **(scaling or {}), **theta}}
    if scaling is not None:
        scaling[rope_key] = scaling.pop("rope_type")
    return fields | {"rope_theta": config.rope_theta, "rope_scaling": scaling}


def _hf_scaling(scaling: RopeScaling) -> dict[str, Any]:
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    assert scaling.kind == "llama3", "Hugging Face configs have no factors per pair"
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context_length,
    }


def _add_config(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    if config.rope_scaling is None:
        return
    if config.rope_scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
    else:
        factors = rope_frequencies(replace(config, rope_scaling=None)) / rope_frequencies(config)
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    state = json.loads(tokenizer().to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIAL_TOKENS else normal for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in state["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(EOS_ID)
    writer.add_eot_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _encode(values: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    values = np.ascontiguousarray(values)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
