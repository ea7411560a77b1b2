"""Typed access to GGUF metadata, and what it says about the tokenizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from libs.checkpoint.errors import CheckpointError, UnsupportedModel
from libs.checkpoint.gguf_file import GgufValue
from libs.checkpoint.tokenizer_data import GgufTokenizer

_BOS_BY_DEFAULT = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3"})


@dataclass(frozen=True, slots=True)
class Metadata:
    """Each getter raises CheckpointError, naming the key, where it is absent or of another type."""

    path: Path
    values: dict[str, GgufValue]

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "an integer")
        return value

    def optional_id(self, key: str, default: int | None = None) -> int | None:
        return self.integer(key) if key in self.values else default

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(key, "a finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "a boolean")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._get(key, None)
        if not isinstance(value, list):
            raise self._wrong(key, "an array of strings")
        return value

    def integers(self, key: str) -> list[int]:
        return [int(item) for item in self._array(key, "iu")]

    def numbers(self, key: str) -> list[float]:
        return [float(item) for item in self._array(key, "f")]

    def _array(self, key: str, kinds: str) -> list[int | float]:
        value = self._get(key, None)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
            raise self._wrong(key, "an array of numbers")
        items: list[int | float] = value.tolist()
        return items

    def _get(self, key: str, default: GgufValue | None) -> GgufValue:
        value = self.values.get(key, default)
        if value is None:
            raise CheckpointError(self.path, f"metadata key {key!r} is missing")
        return value

    def _wrong(self, key: str, wanted: str) -> CheckpointError:
        return CheckpointError(self.path, f"metadata key {key!r} is not {wanted}")


def read_tokenizer(metadata: Metadata) -> GgufTokenizer:
    """`tokenizer.ggml.*`. Raises UnsupportedModel for anything but byte-level and SentencePiece BPE."""
    model = metadata.text("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModel(metadata.path, f"tokenizer {model!r} is not supported; gpt2 and llama are")
    pieces = model == "llama"
    tokens = metadata.texts("tokenizer.ggml.tokens")
    types = metadata.integers("tokenizer.ggml.token_type")
    scores = metadata.numbers("tokenizer.ggml.scores") if pieces else []
    for what, length in (("token_type", len(types)), ("scores", len(scores) if pieces else len(tokens))):
        if length != len(tokens):
            raise CheckpointError(
                metadata.path, f"damaged: tokenizer.ggml.{what} has {length} entries for {len(tokens)} tokens"
            )
    pre = metadata.text("tokenizer.ggml.pre", "default")
    special = {
        name: _token_id(metadata, f"tokenizer.ggml.{name}_token_id", default if pieces else None, len(tokens))
        for name, default in (("bos", 1), ("eos", 2), ("unknown", 0))
    }
    return GgufTokenizer(
        model=model,
        pre=pre,
        tokens=tuple(tokens),
        token_types=tuple(types),
        scores=tuple(scores),
        merges=() if pieces else tuple(metadata.texts("tokenizer.ggml.merges")),
        bos_id=special["bos"],
        eos_id=special["eos"],
        unk_id=special["unknown"],
        add_bos=metadata.flag("tokenizer.ggml.add_bos_token", pieces or pre in _BOS_BY_DEFAULT),
        add_space_prefix=metadata.flag("tokenizer.ggml.add_space_prefix", pieces),
    )


def eos_token_ids(metadata: Metadata, tokenizer: GgufTokenizer) -> tuple[int, ...]:
    """Ids that end a generation: end of sequence, of turn and of message, as far as the file names them."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eot", "eom"))
    ids = [tokenizer.eos_id, *(_token_id(metadata, key, None, len(tokenizer.tokens)) for key in keys)]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _token_id(metadata: Metadata, key: str, default: int | None, vocab_size: int) -> int | None:
    value = metadata.optional_id(key, default)
    if value is not None and not 0 <= value < vocab_size:
        raise CheckpointError(metadata.path, f"damaged: {key} is {value}, outside the {vocab_size} tokens")
    return value
