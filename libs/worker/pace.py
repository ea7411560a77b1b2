"""How fast a worker is, from its own steps, and whether what it is asked to do can be done in time.

A queue that is bounded by count alone lets everybody in and serves nobody in time: past its capacity, each answer would
come after its deadline. So a worker takes a request only if, at its present pace, a good part of the time is left.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from libs.engine.step import StepEvent
from libs.wire.errors import Code, RequestRefused

SHARE: Final = 0.5  # of a request's remaining time that one worker's part may be expected to take
_WEIGHT: Final = 0.2  # of the newest value in a running mean
_MIN_CHUNK: Final = 16  # tokens; smaller steps say nothing about reading prompts


@dataclass(slots=True)
class Mean:
    """A running mean; 0 before the first value."""

    value: float = 0.0

    def add(self, value: float) -> None:
        self.value += (_WEIGHT if self.value else 1.0) * (value - self.value)


class Pace:
    """Running means over steps. `max_rows` sequences at most take part in one step."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._prompt_tokens_per_s = Mean()
        self._step_s = Mean()  # of steps that read no prompt
        self._answer_tokens = Mean()

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens that this worker computes in a second; 0: not known yet."""
        return self._prompt_tokens_per_s.value

    def step(self, events: list[StepEvent]) -> None:
        """Learns from what a step did."""
        if not events:
            return
        seconds = (events[0].ended_ns - events[0].started_ns) / 1e9
        if seconds > 0:
            self._time(sum(event.num_computed for event in events), len(events), seconds)
        for event in events:
            if event.reason is not None:
                self._answer_tokens.add(event.seq.num_generated)

    def _time(self, computed: int, rows: int, seconds: float) -> None:
        if computed == rows:
            self._step_s.add(seconds)
        elif computed >= _MIN_CHUNK:
            self._prompt_tokens_per_s.add(computed / seconds)

    def prompt_s(self, num_tokens: int) -> float:
        """To compute so many tokens of prompts; 0 as long as nothing is known."""
        rate = self._prompt_tokens_per_s.value
        return num_tokens / rate if rate else 0.0

    def turn_s(self, num_ahead: int) -> float:
        """Until a new answer has a place in the step, with `num_ahead` others here. Answers end as others did."""
        rounds = max(0, num_ahead + 1 - self._max_rows) / self._max_rows
        return rounds * self._answer_tokens.value * self._step_s.value

    def answer_s(self, max_tokens: int) -> float:
        """To write an answer of at most `max_tokens`, once it has its place."""
        return min(self._answer_tokens.value or max_tokens, max_tokens) * self._step_s.value


def is_late(ahead_s: float, own_s: float, deadline_ns: int) -> bool:
    """Whether a request that needs `own_s` comes too late behind what takes `ahead_s`.

    With nothing ahead it never does: refusing it would make nothing better, and the estimate may be wrong.
    """
    return ahead_s > 0 and ahead_s + own_s > _allowed_s(deadline_ns)


def refuse_if_late(worker_id: str, ahead_s: float, own_s: float, deadline_ns: int) -> None:
    """Raises RequestRefused (OVERLOADED) for a request that `is_late`."""
    if not is_late(ahead_s, own_s, deadline_ns):
        return
    needed_s, allowed_s = ahead_s + own_s, _allowed_s(deadline_ns)
    message = (
        f"{worker_id} would need {needed_s:.1f} s with all that it has to do already; "
        f"the deadline leaves it {allowed_s:.1f} s"
    )
    raise RequestRefused(Code.OVERLOADED, message, retryable=True, retry_after_s=needed_s - allowed_s)


def _allowed_s(deadline_ns: int) -> float:
    """The share of what is left."""
    return max(0.0, SHARE * (deadline_ns - time.time_ns()) / 1e9)
