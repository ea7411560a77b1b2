"""What a scheduler decides and a runner executes: plain data, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from libs.wire.messages import Sampling, Token


@dataclass(frozen=True, slots=True)
class Draw:
    """Sample the token that follows the row's last token.

    `history` is prompt and answer up to here (penalties look at it), `num_prompt_tokens` of it are prompt;
    the drawn token gets position `len(history)`, which with the seed keys the generator.
    """

    sampling: Sampling
    history: tuple[int, ...] | list[int]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """Compute `tokens` of one sequence, at positions `start ...`, into `blocks` (its whole block table).

    KV of positions below `start` is already in the blocks.
    """

    request_id: str
    tokens: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    draw: Draw | None  # None: more of the prompt follows in a later step

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
