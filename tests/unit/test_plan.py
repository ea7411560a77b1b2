"""A plan that was made ahead, when the tokens it waits for are there."""

from __future__ import annotations

from libs.engine.plan import Draw, Row, StepPlan, resolve
from libs.wire.messages import Sampling, Token

GREEDY = Sampling(temperature=0.0)
PENALISED = Sampling(temperature=0.0, frequency_penalty=1.0)
BEFORE = StepPlan((Row("a", (5,), 3, (0,), Draw(GREEDY, [1, 2, 3, 5], 2)), Row("p", (6, 7), 0, (1,), None)))


def pending(history: list[int], sampling: Sampling = GREEDY, stops: frozenset[int] = frozenset()) -> Row:
    return Row("a", (-1,), 4, (0, 1), Draw(sampling, history, 2), stops)


def test_the_token_comes_in() -> None:
    (row,) = resolve(StepPlan((pending([1, 2, 3, 5]),)), BEFORE, (Token(id=9), None)).rows
    assert (row.tokens, row.start, row.end, row.blocks, row.stops) == ((9,), 4, 5, (0, 1), None)
    assert row.draw is not None and row.draw.position == 5


def test_the_position_holds_whether_the_history_has_grown_or_not() -> None:
    for history in ([1, 2, 3, 5], [1, 2, 3, 5, 9], [1, 2, 3, 5, 9, 8]):
        for sampling in (GREEDY, PENALISED):
            (row,) = resolve(StepPlan((pending(history, sampling),)), BEFORE, (Token(id=9), None)).rows
            assert row.draw is not None and row.draw.position == 5
            if sampling is PENALISED:
                assert row.draw.history == [1, 2, 3, 5, 9]


def test_a_stop_token_takes_the_row_away() -> None:
    plan = StepPlan((pending([1, 2, 3, 5], stops=frozenset({9})), Row("p", (8,), 2, (1,), None)))
    assert [row.request_id for row in resolve(plan, BEFORE, (Token(id=9), None)).rows] == ["p"]


def test_a_row_whose_step_before_was_taken_away_goes_too() -> None:
    before = StepPlan(BEFORE.rows[1:])
    assert resolve(StepPlan((pending([1]),)), before, (None,)).rows == ()


def test_rows_that_wait_for_nothing_stay_as_they_are() -> None:
    row = Row("p", (8,), 2, (1,), None)
    assert resolve(StepPlan((row,)), BEFORE, (Token(id=9), None)).rows == (row,)
