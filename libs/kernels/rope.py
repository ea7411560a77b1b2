"""Rotary position embedding: pair i of a head is (i, i + head_dim / 2), rotated by position * frequency[i]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin of every position, each [positions, head_dim / 2] in float32.

    Computed once in float64, so a position's angles are the same in every batch.
    """

    cos: Tensor
    sin: Tensor

    @staticmethod
    def build(frequencies: NDArray[np.float64], num_positions: int) -> RopeTable:
        """`frequencies` in radians per position, [head_dim / 2]."""
        angles = np.arange(num_positions, dtype=np.float64)[:, None] * frequencies
        return RopeTable(
            torch.from_numpy(np.cos(angles).astype(np.float32)),
            torch.from_numpy(np.sin(angles).astype(np.float32)),
        )

    def at(self, positions: Tensor) -> RopeTable:
        """The rows of these positions, shaped to rotate [tokens, heads, head_dim / 2]."""
        return RopeTable(self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1))


def rope_reference(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Each pair as a complex number, turned; in float64."""
    first, second = x.double().chunk(2, dim=-1)
    angles = positions.double()[:, None, None] * frequencies
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def rope(x: Tensor, angles: RopeTable, out: Tensor) -> None:
    """out = x rotated: [tokens, heads, head_dim], any strides; `angles` from `RopeTable.at`."""
    first, second = x.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, angles.cos, out=out_first).sub_(second * angles.sin)
    torch.mul(second, angles.cos, out=out_second).add_(first * angles.sin)
