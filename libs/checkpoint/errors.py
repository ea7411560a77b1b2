"""Errors of this package.

CheckpointError        a model that cannot be opened; names the file and what is wrong with it
  UnsupportedModel     the file is sound, but Baton does not run what it holds
"""

from __future__ import annotations

from pathlib import Path

from libs.wire.errors import BatonError


class CheckpointError(BatonError):
    """`path` is the file or folder to blame, `reason` what is wrong with it."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class UnsupportedModel(CheckpointError):
    """The reason names the architecture, rope scaling, tensor type or tokenizer that is not supported."""
