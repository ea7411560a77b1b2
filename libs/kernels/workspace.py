"""Scratch memory that is kept from call to call."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """Named scratch tensors: large temporaries cost page faults each time they are allocated afresh.

    A tensor is valid until the same name is taken again. For one thread.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised contiguous tensor; its memory grows to the largest that was asked for."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(shape)
