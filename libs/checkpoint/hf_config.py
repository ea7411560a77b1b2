"""config.json of a Hugging Face folder as a ModelConfig."""

from __future__ import annotations

from pathlib import Path

import msgspec

from libs.checkpoint.config import ModelConfig, RopeScaling, check_config
from libs.checkpoint.errors import CheckpointError, UnsupportedModel
from libs.checkpoint.hf_json import HfConfig, HfRope, read_json

ARCHITECTURES = {  # model_type: the class that generates text
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
CONFIG_FILE = "config.json"
_QWEN3_HEAD_DIM = 128  # where the config does not say


class _ModelType(msgspec.Struct, frozen=True):
    model_type: str
    architectures: list[str] | None = None


def read_config(folder: Path) -> ModelConfig:
    """Raises UnsupportedModel, by name, for everything that the engine does not run."""
    path = folder / CONFIG_FILE
    _check_architecture(path, read_json(path, _ModelType))  # first: other fields may be absent elsewhere
    hf = read_json(path, HfConfig)
    _check_features(path, hf)
    rope = hf.rope_scaling or hf.rope_parameters or HfRope()
    config = ModelConfig(
        architecture=hf.model_type,
        name=_name(folder),
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads or hf.num_attention_heads,
        head_dim=hf.head_dim or _head_dim(hf),
        context_length=hf.max_position_embeddings,
        rms_norm_eps=hf.rms_norm_eps,
        rope_theta=rope.rope_theta or hf.rope_theta or 10000.0,
        rope_scaling=_rope_scaling(path, rope),
        tied_head=hf.tie_word_embeddings,
        qkv_bias=hf.model_type == "qwen2",
        qk_norm=hf.model_type == "qwen3",
        sliding_window=_sliding_window(path, hf),
    )
    check_config(path, config)
    return config


def _check_architecture(path: Path, model: _ModelType) -> None:
    expected = ARCHITECTURES.get(model.model_type)
    if expected is None:
        names = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(
            path, f"architecture {model.model_type!r} is not supported; supported are {names}"
        )
    if model.architectures and expected not in model.architectures:
        raise UnsupportedModel(path, f"architectures {model.architectures} is not supported; {expected} is")


def _check_features(path: Path, hf: HfConfig) -> None:
    rope = (hf.rope_scaling, hf.rope_parameters)
    partial = [hf.partial_rotary_factor, *(part.partial_rotary_factor for part in rope if part)]
    problems = {
        "quantization_config (quant_method {!r})".format(
            hf.quantization_config.quant_method if hf.quantization_config else ""
        ): hf.quantization_config is not None,
        f"hidden_act {hf.hidden_act!r}": hf.hidden_act != "silu",
        "attention_bias": hf.attention_bias,
        "mlp_bias": hf.mlp_bias,
        "partial_rotary_factor": any(factor not in (None, 1.0) for factor in partial),
        "rope parameters per kind of layer": any(
            part is not None and (part.full_attention or part.sliding_attention) for part in rope
        ),
    }
    for problem, present in problems.items():
        if present:
            raise UnsupportedModel(path, f"{problem} is not supported")


def _head_dim(hf: HfConfig) -> int:
    if hf.model_type == "qwen3":
        return _QWEN3_HEAD_DIM
    return hf.hidden_size // max(hf.num_attention_heads, 1)


def _rope_scaling(path: Path, rope: HfRope) -> RopeScaling | None:
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise UnsupportedModel(path, f"rope scaling {kind!r} is not supported; linear and llama3 are")
    factor = _positive(path, "factor", rope.factor)
    if kind == "linear":
        return RopeScaling("linear", factor)
    low = _positive(path, "low_freq_factor", rope.low_freq_factor)
    high = _positive(path, "high_freq_factor", rope.high_freq_factor)
    if high <= low:
        raise CheckpointError(
            path, f"rope scaling: high_freq_factor {high} is not above low_freq_factor {low}"
        )
    length = _positive(path, "original_max_position_embeddings", rope.original_max_position_embeddings)
    return RopeScaling("llama3", factor, low, high, int(length))


def _positive(path: Path, key: str, value: float | None) -> float:
    if value is None or not value > 0:
        raise CheckpointError(path, f"rope scaling: {key} is {value}, not a positive number")
    return value


def _sliding_window(path: Path, hf: HfConfig) -> int | None:
    """Window of all layers, in tokens; None where it never cuts anything."""
    if hf.model_type == "mistral":
        some = every = True
    elif hf.model_type != "llama" and hf.use_sliding_window:
        # layers before max_window_layers attend to everything
        some, every = hf.max_window_layers < hf.num_hidden_layers, hf.max_window_layers <= 0
    else:
        return None
    window = hf.sliding_window
    if hf.layer_types is not None:
        kinds = set(hf.layer_types)
        if unknown := kinds - {"full_attention", "sliding_attention"}:
            raise UnsupportedModel(path, f"layer type {min(unknown)!r} is not supported")
        some, every = "sliding_attention" in kinds, kinds == {"sliding_attention"}
    if window is None or window >= hf.max_position_embeddings or not some:
        return None
    if not every:
        raise UnsupportedModel(path, "a sliding window in some layers only is not supported")
    return window


def _name(folder: Path) -> str:
    """The folder's name; for a snapshot in the Hugging Face cache, the repository's."""
    cached = folder.parent.parent.name
    if folder.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/")
    return folder.name
