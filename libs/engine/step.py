"""Around a step: rows from sequences, checks of what a runner returns, and what a worker is told."""

from __future__ import annotations

from dataclasses import dataclass

from libs.engine.plan import Draw, Row, StepPlan
from libs.engine.sequence import Sequence
from libs.wire.errors import BatonError
from libs.wire.messages import FinishReason, Token


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What a step (or its failure) did to one sequence.

    A sequence ends with the event that has a `reason` or an `error`. The stop token that ended it is among
    `tokens`. The blocks of a sequence that ended with a `reason` stand until the receiver of the event returns;
    after an `error` they are gone.
    """

    seq: Sequence
    tokens: tuple[Token, ...] = ()
    reason: FinishReason | None = None
    error: BatonError | None = None
    num_computed: int = 0  # tokens whose KV this step computed
    started_ns: int = 0  # of the step, ns since 1970
    ended_ns: int = 0

    @property
    def is_last(self) -> bool:
        return self.reason is not None or self.error is not None


class PlanMismatch(ValueError):
    """A runner's answer does not fit the plan it was given."""


def row_of(seq: Sequence, count: int) -> Row:
    """The next `count` uncomputed tokens of `seq`; with the last of them the next token is drawn."""
    start, end = seq.num_computed, seq.num_computed + count
    draw = Draw(seq.sampling, seq.tokens, seq.num_prompt_tokens) if end == seq.num_tokens else None
    return Row(seq.request_id, tuple(seq.tokens[start:end]), start, tuple(seq.blocks), draw)


def check_drawn(plan: StepPlan, drawn: tuple[Token | None, ...]) -> None:
    """Raises PlanMismatch unless there is a token for each row that asks for one, and for no other."""
    if len(drawn) != len(plan.rows):
        raise PlanMismatch(f"{len(drawn)} results for {len(plan.rows)} rows")
    for row, token in zip(plan.rows, drawn, strict=True):
        if (row.draw is None) != (token is None):
            raise PlanMismatch(f"row {row.request_id}: {'no token' if row.draw else 'a token not asked for'}")
