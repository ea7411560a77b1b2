"""Matrix products whose rows keep their bits.

`NativeMatmul` is the BLAS, used where it was measured to be row-invariant. `TiledMatmul` is so by construction:
every call of the BLAS has the same number of rows, so nothing it decides by shape can differ. It is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from libs.kernels.determinism import Shape, row_invariant

_ROWS = 16  # of a tile


class Matmul(Protocol):
    """Products of float32 matrices. A row of a result depends on its own operands alone."""

    name: str

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias: [rows, in], [out, in], [out] -> [rows, out]"""
        ...

    def bmm(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """out = a @ b for each item of a batch: [batch, rows, k], [batch, k, n] -> [batch, rows, n], contiguous.

        At least two rows: BLAS libraries treat one row as a vector, which rounds differently.
        """
        ...


class NativeMatmul:
    """The BLAS as it is."""

    name = "native"

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight, bias)

    def bmm(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        torch.bmm(a, b, out=out)


class TiledMatmul:
    """The BLAS in calls of 16 rows; missing rows are zeros."""

    name = "tiled"

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.cat([linear(tile, weight, bias) for tile in _row_tiles(x)])[: len(x)]

    def bmm(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        for a_item, b_item, out_item in zip(a, b, out, strict=True):
            out_item.copy_(torch.cat([tile @ b_item for tile in _row_tiles(a_item)])[: len(a_item)])


def choose_matmul(shapes: Sequence[Shape]) -> Matmul:
    """The BLAS if rows keep their bits with weights of these shapes (K, N); tiles otherwise."""
    return NativeMatmul() if row_invariant(shapes) else TiledMatmul()


def _row_tiles(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(pad(x, (0, 0, 0, -len(x) % _ROWS)), _ROWS)
