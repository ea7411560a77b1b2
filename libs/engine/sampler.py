"""Which token follows: a function of a row's logits, its seed and its position, and of nothing else.

    logits -> repetition, frequency and presence penalties -> temperature -> top_k -> top_p -> min_p -> draw

Tokens are ranked by logit, equal ones by id. top_p looks at what top_k left, renormalised: it keeps the fewest
best tokens whose probability reaches it. min_p is relative to the best token. The draw inverts the cumulative
distribution in that order. Reported log-probabilities are those of the model: of the raw logits, before all this.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from libs.engine.plan import Draw
from libs.wire.messages import Sampling, Token

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_GREEDY_BELOW = 1e-5  # temperatures that single precision cannot tell from 0
_HEAD = 1024  # tokens that are ranked before all are


class LogitsError(ArithmeticError):
    """Logits that are no numbers: damaged weights or KV. Nothing was drawn."""


def sample(logits: Floats, draws: Sequence[Draw]) -> list[Token]:
    """One token for each row of `logits`, float32 [draws, vocabulary]. Raises LogitsError."""
    if not draws:
        return []
    return [_sample_row(row, draw) for row, draw in zip(logits, draws, strict=True)]


def _sample_row(row: Floats, draw: Draw) -> Token:
    best = int(row.argmax())  # the first of equals; the first NaN, if there is one
    if not np.isfinite(row[best]):
        raise LogitsError(f"the logit of token {best} at position {draw.position} is {row[best]}")
    return Token(id=best) if _is_plain(draw) else _draw(row, draw, best)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), the same for the same seed and position on every machine (Philox 4x64)."""
    raw = np.random.Philox(key=seed, counter=position).random_raw()
    return float(int(raw) >> 11) * 2.0**-53


def _is_plain(draw: Draw) -> bool:
    """The best logit is the answer, and nothing else is asked."""
    sampling = draw.sampling
    return sampling.temperature < _GREEDY_BELOW and sampling.logprobs is None and not draw.has_penalties


def _draw(row: Floats, draw: Draw, best: int) -> Token:
    sampling = draw.sampling
    adjusted = _penalise(row, draw) if draw.has_penalties else row
    if sampling.temperature >= _GREEDY_BELOW:
        token_id = _pick(adjusted, sampling, uniform(sampling.seed, draw.position))
    else:
        token_id = best if adjusted is row else int(adjusted.argmax())
    if sampling.logprobs is None:
        return Token(id=token_id)
    normaliser = row[best] + np.log(np.exp(row - row[best]).sum(dtype=np.float64))
    top = _ranked(row, min(sampling.logprobs, len(row)))
    return Token(
        id=token_id,
        logprob=float(row[token_id] - normaliser),
        top=tuple((int(i), float(row[i] - normaliser)) for i in top),
    )


def _penalise(row: Floats, draw: Draw) -> Floats:
    """Repetition looks at prompt and answer, frequency and presence at the answer alone."""
    sampling, history = draw.sampling, np.array(draw.history[: draw.position], np.int64)
    row = row.copy()
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(history)
        values = row[seen]
        row[seen] = np.where(
            values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
        )
    answered, counts = np.unique(history[draw.num_prompt_tokens :], return_counts=True)
    row[answered] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    return row


def _pick(row: Floats, sampling: Sampling, point: float) -> int:
    """The token at `point`, in [0, 1), of the cumulative distribution."""
    weights = np.exp((row - row.max()) / np.float32(sampling.temperature))  # of the best: 1
    size = len(row)
    limit = min(sampling.top_k, size) if sampling.top_k > 0 else size
    everything = float(weights.sum(dtype=np.float64))
    for count in (limit,) if sampling.top_k > 0 else (min(_HEAD, size), size):
        ids = _ranked(row, count)
        ranked = weights[ids]
        mass = ranked.cumsum(dtype=np.float64)
        total = everything if limit == size else float(mass[-1])
        kept = _num_kept(ranked, mass, total, sampling)
        target = point * (float(mass[kept - 1]) if kept < count else total)
        if count == limit or kept < count or (_keeps_all(sampling) and target < mass[-1]):
            break  # else the answer may lie behind those that were ranked
    return int(ids[min(int(mass.searchsorted(target, side="right")), kept - 1)])


def _num_kept(ranked: Floats, mass: NDArray[np.float64], total: float, sampling: Sampling) -> int:
    """How many of the ranked tokens top_p and min_p leave: one at least."""
    kept = len(ranked)
    if sampling.top_p < 1.0:
        kept = min(kept, int(mass.searchsorted(sampling.top_p * total)) + 1)
    if sampling.min_p > 0.0:
        kept = min(kept, int((ranked >= sampling.min_p).sum()))
    return max(kept, 1)


def _keeps_all(sampling: Sampling) -> bool:
    return sampling.top_p >= 1.0 and sampling.min_p <= 0.0


def _ranked(row: Floats, count: int) -> Ids:
    """Ids of the `count` best, best first, equal ones by id. Sorts no more than it must."""
    if count == 0:
        return np.empty(0, np.int64)
    ids = np.arange(len(row))
    if count < len(row):
        threshold = np.partition(row, len(row) - count)[len(row) - count]
        ids = np.flatnonzero(row >= threshold)
    keys = (_descending(row[ids]).astype(np.uint64) << np.uint64(32)) | ids.astype(np.uint64)
    keys.sort()  # of one integer each: several times faster than a stable sort by value
    return (keys[:count] & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _descending(values: Floats) -> NDArray[np.uint32]:
    """Integers that are ordered as the values are, the largest value first."""
    bits = (values + np.float32(0)).view(np.uint32)  # adding 0 makes -0 and 0 the same
    return np.where(bits >> 31, bits, ~(bits | np.uint32(1 << 31)))
