"""Weights as they are stored: quantised blocks or half floats, not turned into float32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StoredType:
    """How a tensor is kept. `type_name` is ggml's: F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q4_K, Q5_K or Q6_K."""

    type_name: str
    shape: tuple[int, ...]  # elements, [out, in] or [out]


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """Rows of a matrix; `data` is [rows, bytes of a row]."""

    type_name: str
    shape: tuple[int, ...]  # elements, [rows, in]
    data: NDArray[np.uint8]
