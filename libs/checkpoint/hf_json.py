"""The JSON files of a Hugging Face folder, decoded into types."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from libs.checkpoint.errors import CheckpointError

MAX_JSON_BYTES = 100_000_000  # the index of the largest models has a few million

T = TypeVar("T")


class HfRope(msgspec.Struct, frozen=True):
    """`rope_scaling`, or `rope_parameters` as newer configs call it; `type` is the older key."""

    rope_type: str | None = None
    type: str | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    full_attention: object = None  # per kind of layer: not supported
    sliding_attention: object = None


class HfQuantization(msgspec.Struct, frozen=True):
    quant_method: str = "unknown"


class HfConfig(msgspec.Struct, frozen=True):
    """config.json. Defaults are those of the format where a key is absent."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    architectures: list[str] | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: HfRope | None = None
    rope_parameters: HfRope | None = None
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = 4096  # where the key is absent; null means none
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    quantization_config: HfQuantization | None = None
    eos_token_id: int | list[int] | None = None


class HfGeneration(msgspec.Struct, frozen=True):
    """generation_config.json"""

    eos_token_id: int | list[int] | None = None


class HfIndex(msgspec.Struct, frozen=True):
    """model.safetensors.index.json"""

    weight_map: dict[str, str]


def read_json(path: Path, kind: type[T]) -> T:
    """The file's content as `kind`. Raises CheckpointError, naming the field that is wrong."""
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise CheckpointError(path, f"has {size} bytes; at most {MAX_JSON_BYTES} are read")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError as error:
        raise CheckpointError(path, "is missing") from error
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(path, f"damaged: {error}") from error
