"""A model that was opened: everything about it is known, and its weights can be read one by one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from libs.checkpoint.config import ModelConfig
from libs.checkpoint.fingerprint import fingerprint_files
from libs.checkpoint.raw import RawTensor, StoredType
from libs.checkpoint.tokenizer_data import GgufTokenizer, HfTokenizer


class Weights(Protocol):
    """Where tensors come from. Implementations are safe to use from several threads."""

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names (see `parameters`), in the order of their use."""

    def read(self, name: str) -> NDArray[np.float32]:
        """A fresh array. Raises KeyError for a name that is not in `names`, CheckpointError for bad bytes."""

    def stored(self, name: str) -> StoredType:
        """How the file keeps it. Raises KeyError for a name that is not in `names`."""

    def read_raw(self, name: str, rows: range) -> RawTensor:
        """Consecutive rows of a matrix as they are stored; raises as `read` does."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Opening checked every tensor's presence, shape, type and place; reading one can only fail on I/O."""

    config: ModelConfig
    path: Path
    tokenizer: GgufTokenizer | HfTokenizer
    chat_template: str | None  # Jinja source
    eos_token_ids: tuple[int, ...]
    content_files: tuple[Path, ...]  # what `fingerprint` covers: weights, and config where it is a file
    weights: Weights

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Canonical names, e.g. `layers.0.q.weight`; `head.weight` is absent when it is tied to `embed`."""
        return self.weights.names

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A weight, freshly dequantised: [out, in], or [out] for norms and biases.

        Rows of q and k are in the order for rotation by halves, whatever the file's order. Raises KeyError
        for an unknown name, CheckpointError where the file changed or cannot be read any more.
        """
        return self.weights.read(name)

    def stored(self, name: str) -> StoredType:
        """Type and shape of a weight in the file. Raises KeyError for an unknown name."""
        return self.weights.stored(name)

    def raw(self, name: str, rows: range | None = None) -> RawTensor:
        """A matrix as it is stored, without dequantising: all rows, or the consecutive ones of `rows`.

        Rows of q and k are in the order for rotation by halves here too. Raises KeyError for an unknown name,
        ValueError for rows that it does not have, CheckpointError where the file changed or cannot be read.
        """
        shape = self.weights.stored(name).shape
        rows = range(shape[0]) if rows is None else rows
        if len(shape) != 2 or rows.step != 1 or not 0 <= rows.start <= rows.stop <= shape[0]:
            raise ValueError(f"{name!r} of shape {list(shape)} has no rows {rows}")
        return self.weights.read_raw(name, rows)

    def fingerprint(self, cache_dir: Path) -> str:
        """SHA-256 (hex) over the content of the files; equal on every machine that has the same files.

        Digests are remembered in `cache_dir`, so only the first call for a file reads it. Raises
        CheckpointError where a file cannot be read.
        """
        return fingerprint_files(self.content_files, cache_dir)
