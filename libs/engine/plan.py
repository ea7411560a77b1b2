"""What a scheduler decides and a runner executes: plain data, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from libs.wire.messages import Sampling, Token


@dataclass(frozen=True, slots=True)
class Draw:
    """Sample the token that follows the row's last token.

    `history` is prompt and answer up to here (penalties look at it), `num_prompt_tokens` of it are prompt;
    the drawn token gets the position behind them, which with the seed keys the generator. `history` may be a list
    that grows while the draw is on its way: `num_tokens` of it count, all where that is None.
    """

    sampling: Sampling
    history: tuple[int, ...] | list[int]
    num_prompt_tokens: int
    num_tokens: int | None = None

    @property
    def position(self) -> int:
        return len(self.history) if self.num_tokens is None else self.num_tokens

    @property
    def has_penalties(self) -> bool:
        """Only then does the draw depend on what `history` holds."""
        return (
            self.sampling.repetition_penalty != 1.0
            or self.sampling.frequency_penalty != 0.0
            or self.sampling.presence_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class Row:
    """Compute `tokens` of one sequence, at positions `start ...`, into `blocks` (its whole block table).

    KV of positions below `start` is already in the blocks. A row with `stops` waits for the step before it, which
    draws its only token: see `resolve`. No runner sees one.
    """

    request_id: str
    tokens: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    draw: Draw | None  # None: more of the prompt follows in a later step
    stops: frozenset[int] | None = None  # tokens with which the sequence ends instead

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the engine: at most one row per sequence, drawn tokens come back in row order."""

    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


def resolve(plan: StepPlan, before: StepPlan, drawn: Sequence[Token | None]) -> StepPlan:
    """`plan` with the tokens that the step before it has drawn; rows of sequences that ended with it are left out."""
    tokens = {row.request_id: token for row, token in zip(before.rows, drawn, strict=True)}
    return StepPlan(tuple(row for row in (_resolved(row, tokens) for row in plan.rows) if row is not None))


def _resolved(row: Row, tokens: Mapping[str, Token | None]) -> Row | None:
    if row.stops is None:
        return row
    token = tokens.get(row.request_id)
    if token is None or token.id in row.stops:
        return None
    draw = row.draw
    if draw is not None and draw.has_penalties:  # the list may or may not hold the token by now
        draw = replace(draw, history=[*draw.history[: row.start], token.id])
    elif draw is not None:
        draw = replace(draw, num_tokens=row.end)
    return replace(row, tokens=(token.id,), draw=draw, stops=None)


class StepAbandoned(Exception):
    """Nobody wants this step any more. What it was to write to its blocks is unknown."""


def never() -> bool:
    return False


class Runner(Protocol):
    """Executes plans, on the engine's own thread. A real one runs a model; a fake one scripts tokens."""

    def execute(self, plan: StepPlan, is_abandoned: Callable[[], bool] = never) -> tuple[Token | None, ...]:
        """Writes the rows' KV to the pool and returns one entry per row: the drawn token, or None.

        A step that takes long asks `is_abandoned` now and then, and raises StepAbandoned when it is.
        """
        ...
