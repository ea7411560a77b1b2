"""Rotary position embedding: frequencies, and the order of rows that the engine expects."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from libs.checkpoint.config import ModelConfig, RopeScaling

_T = TypeVar("_T", bound=np.generic)


def rope_frequencies(config: ModelConfig) -> NDArray[np.float64]:
    """Radians per position of each rotary pair, [head_dim / 2], scaling applied."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / np.asarray(scaling.factors, dtype=np.float64)
    return _llama3(frequencies, scaling)


def _llama3(frequencies: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    """Long wavelengths are divided by the factor, short ones kept, those between are blended.

    `turns` counts how often a pair turns within the original context: below `low_freq_factor` it is long,
    above `high_freq_factor` short.
    """
    turns = scaling.original_context_length * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def interleaved_to_halves(rows: NDArray[_T], num_heads: int) -> NDArray[_T]:
    """Reorder the rows of a q or k projection, [num_heads * head_dim, ...], for rotation by halves.

    GGUF files of the llama architecture keep rotary pair i of a head in rows (2i, 2i + 1); the engine
    rotates rows (i, i + head_dim / 2), as Hugging Face models do.
    """
    pairs = rows.shape[0] // num_heads // 2
    split = rows.reshape(num_heads, pairs, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)
