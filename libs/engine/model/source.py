"""Where the engine's weights come from."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from libs.checkpoint.config import ModelConfig


class TensorSource(Protocol):
    """The part of a checkpoint that gives float32; names as in `libs.checkpoint.parameters`."""

    @property
    def config(self) -> ModelConfig: ...

    def tensor(self, name: str) -> NDArray[np.float32]: ...
