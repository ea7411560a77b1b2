"""Root mean square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension, in float64."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same in float32: [..., dim], [dim] -> [..., dim]"""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).add_(eps)) * weight
