"""The file that llama-perplexity compares with: tokens, and a reference's log-probabilities after each.

    "_logits_" | n_ctx, n_vocab, n_chunk: i32 | tokens: i32 [n_chunk, n_ctx] | rows: [n_chunk, n_ctx - 1 - first]
    row: scale f32 | least f32 | u16 [n_vocab, made even]        log p = scale * u16 + least

`first` is n_ctx // 2: positions first .. n_ctx - 2 of each text are compared. Log-probabilities more than 16
below the row's largest are cut off, and whatever is below -16 is left out of the sum. Baton is held against the
same file by the same rule, so that the two means are of the same quantity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from libs.wire.errors import BatonError

Floats = NDArray[np.float32]
_MAGIC = b"_logits_"
_RANGE = 16.0
_LEVELS = 65535


def write_base(path: Path, texts: Sequence[Sequence[int]], logits: Iterable[Floats]) -> None:
    """`logits` has one array per text: [positions compared, vocabulary]. All texts have one length."""
    tokens = np.array(texts, "<i4")
    with path.open("wb") as file:
        vocab_size = 0
        for index, rows in enumerate(logits):
            if index == 0:
                vocab_size = rows.shape[1]
                file.write(_MAGIC + np.array([tokens.shape[1], vocab_size, tokens.shape[0]], "<i4").tobytes())
                file.write(tokens.tobytes())
            if rows.shape != (num_compared(tokens.shape[1]), vocab_size):
                raise ValueError(f"logits of text {index} have shape {rows.shape}")
            _write_rows(file, rows)


def num_compared(num_tokens: int) -> int:
    """Positions of a text of this length that are compared."""
    return num_tokens - 1 - num_tokens // 2


class Base:
    """An opened base. Raises BatonError for a file that is none."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise BatonError(f"{path} has no log-probabilities")
            self.num_tokens, self.vocab_size, self.num_texts = np.fromfile(file, "<i4", 3).tolist()
            count = self.num_texts * self.num_tokens
            self.texts = np.fromfile(file, "<i4", count).reshape(self.num_texts, -1).tolist()
            start = file.tell()
        self._rows = np.memmap(
            path,
            "<u2",
            "r",
            start,
            (self.num_texts, num_compared(self.num_tokens), _row_size(self.vocab_size)),
        )

    @property
    def first(self) -> int:
        """The first position that is compared."""
        return int(self.num_tokens) // 2

    def divergence(self, text: int, position: int, logits: Floats) -> float:
        """KL(reference || softmax(logits)) in nats, after the token at `position`; logits: [vocabulary]."""
        row = np.asarray(self._rows[text, position - self.first])
        scale, least = row[:4].view("<f4").astype(np.float64)
        expected = scale * row[4 : 4 + self.vocab_size] + least
        seen = expected > -_RANGE
        actual = _log_softmax(logits.astype(np.float64))
        return float(np.sum(np.exp(expected[seen]) * (expected[seen] - actual[seen])))


def _write_rows(file: BinaryIO, logits: Floats) -> None:
    for row in logits:
        log_p = _log_softmax(row.astype(np.float64))
        least = max(log_p.min(), log_p.max() - _RANGE)
        scale = (log_p.max() - least) / _LEVELS
        levels = np.zeros(_row_size(row.size), "<u2")
        levels[:4] = np.array([scale, least], "<f4").view("<u2")
        if scale > 0:
            levels[4 : 4 + row.size] = np.rint(np.maximum(log_p - least, 0) / scale)
        file.write(levels.tobytes())


def _row_size(vocab_size: int) -> int:
    """In u16."""
    return 2 * ((vocab_size + 1) // 2) + 4


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
