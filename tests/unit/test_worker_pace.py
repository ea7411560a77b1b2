"""What a worker expects of itself, from its steps."""

from __future__ import annotations

import time

import pytest

from libs.engine.sequence import Sequence
from libs.engine.step import StepEvent
from libs.wire.errors import Code, RequestRefused
from libs.wire.messages import Limits, Sampling
from libs.worker.pace import SHARE, Pace, is_late, refuse_if_late


def event(computed: int, seconds: float, *, generated: int = 0, ended: bool = False) -> StepEvent:
    seq = Sequence(
        request_id="r",
        root=b"",
        tokens=[1] * (5 + generated),
        num_prompt_tokens=5,
        sampling=Sampling(),
        limits=Limits(max_tokens=100),
        deadline_ns=0,
        tenant="default",
    )
    reason = "length" if ended else None
    return StepEvent(seq, reason=reason, num_computed=computed, started_ns=0, ended_ns=int(seconds * 1e9))  # type: ignore[arg-type]


def deadline_ns(seconds: float) -> int:
    return time.time_ns() + int(seconds * 1e9)


def test_nothing_is_expected_before_the_first_step() -> None:
    pace = Pace(max_rows=4)
    pace.step([])
    assert (pace.prompt_s(10_000), pace.turn_s(100), pace.answer_s(1000)) == (0.0, 0.0, 0.0)


def test_prompts_take_as_long_as_their_tokens_at_the_usual_rate() -> None:
    pace = Pace(max_rows=4)
    pace.step([event(100, 0.1)])
    assert pace.prompt_s(500) == pytest.approx(0.5)
    for _ in range(100):
        pace.step([event(100, 0.2), event(100, 0.2)])  # two prompts in one step, at the same rate
    assert pace.prompt_s(500) == pytest.approx(0.5)


def test_steps_that_write_answers_say_nothing_of_prompts_nor_the_other_way_round() -> None:
    pace = Pace(max_rows=4)
    pace.step([event(1, 0.01), event(1, 0.01)])
    pace.step([event(1, 0.5), event(14, 0.5)])  # a little of both
    assert pace.prompt_s(500) == 0.0
    assert pace.answer_s(100) == pytest.approx(1.0)


def test_an_answer_waits_for_a_place_in_the_step() -> None:
    pace = Pace(max_rows=4)
    pace.step([event(1, 0.01, generated=50, ended=True)])
    assert pace.answer_s(10) == pytest.approx(0.1)
    assert pace.answer_s(1000) == pytest.approx(0.5), "answers end as others did"
    assert pace.turn_s(3) == 0.0, "there is a place"
    assert pace.turn_s(11) == pytest.approx(2 * 50 * 0.01), "eight before it, four at a time"


def test_a_request_is_refused_once_its_share_of_the_time_is_not_enough() -> None:
    refuse_if_late("w", 0.0, 1000.0, deadline_ns(10))  # with nothing ahead
    refuse_if_late("w", 1.0, 10 * SHARE - 1.1, deadline_ns(10))
    assert is_late(1.0, 10 * SHARE - 0.9, deadline_ns(10))
    with pytest.raises(RequestRefused, match=r"w would need 7\.0 s .* leaves it 5\.0 s") as refused:
        refuse_if_late("w", 6.0, 1.0, deadline_ns(10.0))
    assert (refused.value.code, refused.value.retryable) == (Code.OVERLOADED, True)
    assert refused.value.retry_after_s == pytest.approx(2.0, abs=0.1)
