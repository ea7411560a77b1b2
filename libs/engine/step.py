"""Around a step: rows from sequences, checks of what a runner returns, and what a worker is told."""

from __future__ import annotations

from dataclasses import dataclass

from libs.engine.plan import Draw, Row, StepPlan
from libs.engine.sequence import Sequence, Status
from libs.wire.errors import BatonError
from libs.wire.messages import FinishReason, Token

_PENDING = -1  # stands for a token that is not drawn yet


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


@dataclass(frozen=True, slots=True)
class Next:
    """Where a sequence stands when the plan that is out, if it is in that, has been executed."""

    seq: Sequence
    num_computed: int
    is_pending: bool  # its last token is being drawn

    @staticmethod
    def of(seq: Sequence, flying: Row | None = None) -> Next:
        if flying is None:
            return Next(seq, seq.num_computed, is_pending=False)
        return Next(seq, flying.end, is_pending=flying.draw is not None)

    @property
    def num_tokens(self) -> int:
        return self.seq.num_tokens + self.is_pending

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def has_ended(self) -> bool:
        """For certain; it may also end with a stop token."""
        return self.is_pending and self.seq.num_generated + 1 >= self.seq.limits.max_tokens

    def row(self, count: int) -> Row:
        """The next `count` uncomputed tokens; with the last of them the next token is drawn."""
        seq, start, end = self.seq, self.num_computed, self.num_computed + count
        draw = Draw(seq.sampling, seq.tokens, seq.num_prompt_tokens) if end == self.num_tokens else None
        if not self.is_pending:
            return Row(seq.request_id, tuple(seq.tokens[start:end]), start, tuple(seq.blocks), draw)
        stops = frozenset(() if seq.limits.ignore_eos else seq.limits.stop_token_ids)
        return Row(seq.request_id, (_PENDING,), start, tuple(seq.blocks), draw, stops)


@dataclass(frozen=True, slots=True, eq=False)
class PlanOut:
    """A plan that is out, and the sequences in it by request id."""

    plan: StepPlan
    sequences: dict[str, Sequence]

    def row_of(self, seq: Sequence) -> Row | None:
        if self.sequences.get(seq.request_id) is not seq:
            return None
        return next(row for row in self.plan.rows if row.request_id == seq.request_id)

    @property
    def is_unwanted(self) -> bool:
        return all(seq.status is Status.FINISHED for seq in self.sequences.values())


def check_drawn(plan: StepPlan, drawn: tuple[Token | None, ...]) -> None:
    """Raises PlanMismatch unless there is a token for each row that asks for one, and for no other."""
    if len(drawn) != len(plan.rows):
        raise PlanMismatch(f"{len(drawn)} results for {len(plan.rows)} rows")
    for row, token in zip(plan.rows, drawn, strict=True):
        if (row.draw is None) != (token is None):
            raise PlanMismatch(f"row {row.request_id}: {'no token' if row.draw else 'a token not asked for'}")
