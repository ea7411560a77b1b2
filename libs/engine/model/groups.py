"""Quantised rows in one common form, and float rows quantised into it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libs.kernels.native.formats import GROUP, QUANTISED, Format, Traits

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Rows, cut in groups of 32 along k. A weight is `scale * q + min`.

    `data`: for 4-bit formats [rows, groups, 16], q[i] in the low and q[16 + i] in the high nibble of byte i; for
    8-bit formats [rows, groups, 32], q + 128. `scales`: [rows, groups, 1 or 2]. `mins`: [rows, groups].
    """

    data: Bytes
    scales: NDArray[np.floating]
    mins: NDArray[np.floating] | None = None


def quantise(values: Floats, format: Format) -> Groups:
    """Round [rows, k], k a multiple of 32, to the nearest steps of a quantised format.

    A step is the largest magnitude / 127; in formats with a min, (largest - smallest) / 15 or 255. A group with a
    weight that is not finite becomes NaN, not something that looks sound.
    """
    traits = QUANTISED[format]
    parts = values.reshape(len(values), -1, traits.scales, GROUP // traits.scales)
    with np.errstate(all="ignore"):
        return _with_min(parts, traits) if traits.has_min else _symmetric(parts, traits)


def nibbles(q: Bytes) -> Bytes:
    """0..15, [..., 32] -> [..., 16]"""
    packed = q[..., GROUP // 2 :] << np.uint8(4)
    packed |= q[..., : GROUP // 2]
    return packed


def _symmetric(parts: Floats, traits: Traits) -> Groups:
    scales = (np.abs(parts).max(-1) / np.float32(127)).astype(traits.scale_type)
    q = _steps(parts, scales, -127, 127)
    q += np.float32(128)
    return Groups(q.astype(np.uint8).reshape(len(parts), -1, GROUP), scales)


def _with_min(parts: Floats, traits: Traits) -> Groups:
    top = 2**traits.bits - 1
    mins = parts.min(-1).astype(traits.scale_type)
    scales = ((parts.max(-1) - mins.astype(np.float32)) / np.float32(top)).astype(traits.scale_type)
    steps = _steps(parts - mins.astype(np.float32)[..., None], scales, 0, top)
    q = steps.astype(np.uint8).reshape(len(parts), -1, GROUP)
    if traits.bits == 4:
        return Groups(nibbles(q), scales, mins[..., 0])
    return Groups(q, scales, mins[..., 0] + np.float32(128) * scales[..., 0])


def _steps(values: Floats, scales: NDArray[np.floating], low: int, high: int) -> Floats:
    """The nearest whole numbers of steps; 0 where a step is 0 or no number (its group's weights are NaN anyway)."""
    inverses = np.float32(1) / scales.astype(np.float32)
    inverses[~np.isfinite(inverses)] = 0
    steps: Floats = values * inverses[..., None]
    np.rint(steps, out=steps)
    return np.clip(steps, low, high, out=steps)
