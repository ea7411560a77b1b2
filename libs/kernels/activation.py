"""The gated activation of the MLP."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, in float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate and up side by side, [rows, 2 * dim] -> [rows, dim]

    Composed of operations that round the same wherever a number stands. torch's silu and sigmoid do not: the
    end of a vector, where it is no full register, goes through another exponential.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    result = torch.neg(gate).exp_().add_(1.0)
    return torch.div(gate, result, out=result).mul_(up)
