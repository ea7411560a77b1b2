"""Shape of a Llama-family model, read from GGUF metadata or a Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """`linear`: positions / factor. `llama3`: by wavelength, between the low and high frequency factors."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the layers need to know. Sizes in elements, lengths in tokens."""

    architecture: str  # llama, mistral, qwen2, qwen3
    name: str  # what the checkpoint calls itself; the default served name
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
    sliding_window: int | None = None
