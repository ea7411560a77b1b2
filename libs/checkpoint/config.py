"""Shape of a Llama-family model, read from GGUF metadata or a Hugging Face config."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from libs.checkpoint.errors import CheckpointError

MAX_SIZE = 1 << 30  # elements or tokens; above any model, below what overflows
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "context_length",
)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched; `libs.checkpoint.rope` computes them.

    `linear`: every frequency / factor. `llama3`: by wavelength, between the low and high frequency factors.
    `factors`: frequency of pair i / factors[i] (GGUF stores llama3 scaling this way); `factor` is unused.
    """

    kind: Literal["linear", "llama3", "factors"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192
    factors: tuple[float, ...] = ()  # [head_dim / 2], for `factors` only


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the layers need to know. Sizes in elements, lengths in tokens."""

    architecture: str  # llama, mistral, qwen2, qwen3
    name: str  # from the file's or folder's name; the default served name
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_head: bool = False
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3
    sliding_window: int | None = None  # a token sees itself and the `sliding_window - 1` before it


def check_config(path: Path, config: ModelConfig) -> None:
    """Refuse sizes that no model has, before anything is allocated from them. Raises CheckpointError."""
    for name in _SIZES:
        if not 0 < getattr(config, name) <= MAX_SIZE:
            raise CheckpointError(path, f"{name} is {getattr(config, name)}, not between 1 and {MAX_SIZE}")
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            path, f"{config.num_heads} attention heads cannot share {config.num_kv_heads} kv heads"
        )
    if config.head_dim % 2:
        raise CheckpointError(path, f"head_dim is {config.head_dim}; rotary embedding needs an even number")
    if config.sliding_window is not None and config.sliding_window < 1:
        raise CheckpointError(path, f"sliding_window is {config.sliding_window}, not a positive number")
    for name in ("rms_norm_eps", "rope_theta"):
        value = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            raise CheckpointError(path, f"{name} is {value}, not a positive number")
