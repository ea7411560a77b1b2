"""Measures whether a row's bits depend on nothing but the row, and names the arithmetic in use."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from libs.kernels.environment import MKL_VARIABLE

Shape = tuple[int, int]  # K (in), N (out) of a weight

_MAX_ELEMENTS = 1 << 21  # of a weight that is tried; of larger ones, a part of the columns
_NUM_ROWS = 136
_SLICES = ((0, 1), (7, 8), (2, 5), (5, 18), (9, 42), (64, 128), (1, 135))  # of rows
_BATCHES = ((0, 1), (2, 5), (0, 9))


def numerics(matmul_name: str) -> str:
    """Names the arithmetic of this process: where it is equal, equal inputs give equal bits."""
    capability = torch.backends.cpu.get_cpu_capability()
    branch = os.environ.get(MKL_VARIABLE, "free")
    return f"torch-{torch.__version__}/{capability}/{branch}/{matmul_name}"


def row_invariant(shapes: Sequence[Shape]) -> bool:
    """Whether rows keep their bits for weights of these shapes, alone and among others; some 50 ms.

    Tries products with and without bias, batches of products, and the exponential.
    """
    generator = torch.Generator().manual_seed(0)
    return (
        all(_linear_is_invariant(k, n, generator) for k, n in sorted(set(shapes)))
        and _bmm_is_invariant(generator)
        and exp_is_invariant()
    )


def exp_is_invariant() -> bool:
    """Whether the exponential of a number has the same bits wherever the number stands in a tensor."""
    x = torch.linspace(-20, 3, 100_003)
    whole = torch.exp(x)
    return all(torch.equal(torch.exp(x[a:b]), whole[a:b]) for a, b in ((0, 1), (1, 20), (5, 72), (3, 70_000)))


def _linear_is_invariant(k: int, n: int, generator: torch.Generator) -> bool:
    n = max(min(n, _MAX_ELEMENTS // k), 64)
    x = torch.empty(_NUM_ROWS, k).uniform_(-1, 1, generator=generator)
    weight = torch.empty(n, k).uniform_(-1, 1, generator=generator)
    for bias in (None, weight[:, 0].contiguous()):
        whole = linear(x, weight, bias)
        if not all(torch.equal(linear(x[a:b], weight, bias), whole[a:b]) for a, b in _SLICES):
            return False
    return True


def _bmm_is_invariant(generator: torch.Generator) -> bool:
    rows = torch.empty(9, _NUM_ROWS, 64).uniform_(-1, 1, generator=generator)
    keys = torch.empty(9, 64, 256).uniform_(-1, 1, generator=generator)
    values = torch.empty(9, 256, 64).uniform_(-1, 1, generator=generator)
    whole = _attend(rows, keys, values)
    return all(
        torch.equal(_attend(rows[i:j, a:b], keys[i:j], values[i:j]), whole[i:j, a:b])
        for i, j in _BATCHES
        for a, b in _SLICES
        if b - a > 1  # a single row takes another path; attention pads it
    )


def _attend(rows: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The two products of attention, with their operands laid out as there: keys [batch, dim, tokens]."""
    return torch.bmm(torch.bmm(rows, keys), values)
