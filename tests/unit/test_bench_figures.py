"""Medians, factors, and how figures are written."""

from __future__ import annotations

import json

import pytest

from libs.bench.figures import Figure, merge, number, spread


def test_median_and_extremes() -> None:
    figure = Figure("x", "tok/s", (3.0, 1.0, 10.0))
    assert (figure.median, figure.low, figure.high) == (3.0, 1.0, 10.0)
    assert Figure("x", "tok/s", (3.0, 1.0)).median == 2.0


def test_a_figure_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="no value of x"):
        Figure("x", "tok/s", ())


def test_above_one_is_better_in_either_unit() -> None:
    assert Figure("x", "tok/s", (300.0,)).factor_over(Figure("x", "tok/s", (100.0,))) == 3.0
    assert Figure("x", "ms", (100.0,)).factor_over(Figure("x", "ms", (300.0,))) == 3.0
    with pytest.raises(ValueError, match="cannot be compared"):
        Figure("x", "ms", (1.0,)).factor_over(Figure("x", "tok/s", (1.0,)))


def test_merge_keeps_every_value_in_order() -> None:
    merged = merge([Figure("b", "ms", (1.0,)), Figure("a", "ms", (5.0,)), Figure("b", "ms", (2.0, 3.0))])
    assert list(merged) == ["b", "a"]
    assert merged["b"].values == (1.0, 2.0, 3.0)


def test_json_brings_a_figure_back() -> None:
    figure = Figure("prefill-512", "tok/s", (1.5, 2.5))
    document = json.loads(json.dumps(figure.to_json()))
    assert document["median"] == 2.0
    assert Figure.from_json(document) == figure


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.6, "1235"), (98.76, "98.8"), (2.345, "2.35"), (0.01234, "0.0123"), (0.0, "0"), (99.96, "100.0")],
)
def test_numbers_have_three_digits_or_so(value: float, text: str) -> None:
    assert number(value) == text


def test_spread() -> None:
    assert spread(Figure("x", "ms", (10.0, 20.0, 400.0))) == "20.0 (10.0..400)"
