"""Rotary frequencies against published numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from libs.checkpoint.config import RopeScaling
from libs.checkpoint.rope import rope_frequencies
from tests.checkpoints import tiny_model

CONFIG = tiny_model(head_dim=128, rope_theta=5e5).config
LLAMA3 = RopeScaling("llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=8192)


def test_unscaled() -> None:
    frequencies = rope_frequencies(CONFIG)
    assert frequencies.shape == (64,) and frequencies.dtype == np.float64
    assert frequencies[0] == 1.0
    assert frequencies[32] == pytest.approx(5e5**-0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("pair", "ratio"), [(0, 1.0), (28, 1.0), (29, 0.82817), (32, 0.37112), (40, 0.125), (63, 0.125)]
)
def test_llama3_numbers(pair: int, ratio: float) -> None:
    """Pairs count from 0. The numbers are those of Llama 3.1's scaling."""
    scaled = rope_frequencies(replace(CONFIG, rope_scaling=LLAMA3))
    assert scaled[pair] / rope_frequencies(CONFIG)[pair] == pytest.approx(ratio, abs=5e-6)


def test_linear() -> None:
    scaled = rope_frequencies(replace(CONFIG, rope_scaling=RopeScaling("linear", 4.0)))
    np.testing.assert_array_equal(scaled * 4.0, rope_frequencies(CONFIG))


def test_factors() -> None:
    factors = tuple(float(pair + 1) for pair in range(64))
    scaled = rope_frequencies(replace(CONFIG, rope_scaling=RopeScaling("factors", 1.0, factors=factors)))
    np.testing.assert_allclose(scaled * np.array(factors), rope_frequencies(CONFIG), rtol=1e-15)
