"""Random packed matrices, by the definition of `libs.kernels.native.formats` alone, with the numbers that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libs.kernels.native.formats import ALIGNMENT, GROUP, QUANTISED, TILE, Format, Traits, align

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix [n, k]. `steps` and `mins` add up to its weights; the exact result is known from them."""

    format: Format
    n: int
    k: int
    data: Bytes
    steps: Doubles  # [n, k] scale * q
    mins: Doubles  # [n, k]

    @property
    def weights(self) -> Doubles:
        return self.steps + self.mins


def random_packed(rng: np.random.Generator, format: Format, n: int, k: int) -> Packed:
    """Weights of about 1; every value that q can take, scales of either sign."""
    padded = -(-n // TILE) * TILE
    if format not in QUANTISED:
        return _random_floats(rng, format, n, k, padded)
    traits, num_groups = QUANTISED[format], k // GROUP
    low, high = (0, 16) if traits.bits == 4 else (-128, 128)
    q = rng.integers(low, high, (padded, num_groups, GROUP))
    scales = (
        rng.uniform(0.5, 1.5, (padded, num_groups, traits.scales)) * rng.choice([-2.0, 2.0]) / (high - low)
    )
    scales = scales.astype(traits.scale_type)
    mins = (rng.standard_normal((padded, num_groups)) * traits.has_min).astype(traits.scale_type)
    q[n:], scales[n:], mins[n:] = 0, 0, 0
    steps = q * np.repeat(scales.astype(np.float64), GROUP // traits.scales, axis=2)
    spread = np.repeat(mins.astype(np.float64), GROUP, axis=1)
    data = _pack(traits, q, scales, mins)
    return Packed(format, n, k, data, steps.reshape(padded, k)[:n], spread[:n])


def _pack(
    traits: Traits, q: NDArray[np.int64], scales: NDArray[np.floating], mins: NDArray[np.floating]
) -> Bytes:
    """q [n, groups, 32], scales [n, groups, 1 or 2], mins [n, groups]; n whole tiles."""
    num_tiles, num_groups = len(q) // TILE, q.shape[1]
    numbers = (q[..., :16] | q[..., 16:] << 4) if traits.bits == 4 else q + 128
    chunks = numbers.astype(np.uint8).reshape(num_tiles, TILE, num_groups, -1, 4)
    parts = [
        chunks.transpose(0, 2, 3, 1, 4),  # [tile, group, chunk, output, i]
        scales.reshape(num_tiles, TILE, num_groups, -1).transpose(0, 2, 3, 1),
        mins.reshape(num_tiles, TILE, num_groups).transpose(0, 2, 1),
    ]
    return _records(parts if traits.has_min else parts[:-1])


def _random_floats(rng: np.random.Generator, format: Format, n: int, k: int, padded: int) -> Packed:
    values = rng.standard_normal((padded, k)).astype(np.float32)
    values[n:] = 0
    stored: NDArray[np.generic] = values
    if format is Format.F16:
        stored = values.astype(np.float16)
        values = stored.astype(np.float32)
    elif format is Format.BF16:
        stored = (values.view(np.uint32) >> 16).astype(np.uint16)
        values = (stored.astype(np.uint32) << 16).view(np.float32)
    data = _records([stored.reshape(-1, TILE, k).transpose(0, 2, 1)])
    return Packed(format, n, k, data, values[:n].astype(np.float64), np.zeros((n, k)))


def _records(parts: Sequence[NDArray[Any]]) -> Bytes:
    """Parts [tile, ...] one after the other in each tile's record, records padded, at an aligned address."""
    flat = [np.ascontiguousarray(part).view(np.uint8).reshape(len(part), -1) for part in parts]
    record = np.concatenate(flat, axis=1)
    size = align(record.shape[1])
    memory = np.full(len(record) * size + ALIGNMENT, 0xFF, np.uint8)  # padding that shows when it is read
    start = -memory.ctypes.data % ALIGNMENT
    data = memory[start : start + len(record) * size]
    data.reshape(len(record), size)[:, : record.shape[1]] = record
    return data


def quantised_rows(x: Floats) -> Doubles:
    """Activations as the products of quantised formats see them: 8 bits for each number, a scale for 32."""
    groups = x.reshape(len(x), -1, GROUP)
    largest = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.float32(127) / largest
        q = np.where(np.isinf(inverse), 0, np.rint(groups * inverse))
    seen: Doubles = q.astype(np.float64) * (largest / np.float32(127))
    return seen.reshape(x.shape)


@dataclass(frozen=True)
class Product:
    """x @ weights.T + bias in float64. Errors are measured against the sum of magnitudes: sums may cancel."""

    exact: Doubles  # [rows, n]
    magnitude: Doubles

    @staticmethod
    def of(x: Doubles, matrix: Packed, bias: Floats | None = None) -> Product:
        added = np.zeros(matrix.n) if bias is None else bias.astype(np.float64)
        sizes = np.abs(matrix.steps) + np.abs(matrix.mins)
        return Product(x @ matrix.weights.T + added, np.abs(x) @ sizes.T + np.abs(added))

    def error(self, actual: Floats) -> float:
        if actual.shape != self.exact.shape or not np.isfinite(actual).all():
            return float("inf")
        return float((np.abs(actual - self.exact) / np.maximum(self.magnitude, 1e-30)).max(initial=0.0))
