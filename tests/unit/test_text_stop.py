"""Stop strings in streamed text, against an oracle that sees the whole text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.text.detokenizer import Detokenizer
from libs.text.errors import TextError
from libs.text.stop import StopMatcher
from tests.unit.text_cases import smollm2

texts = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=8), max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    sent = "".join(map(matcher.push, pieces))
    return sent + matcher.flush(), matcher.matched


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """Looks at ever longer texts; the first that ends with stop strings ends at the longest of them."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text: str, positions: list[int]) -> list[str]:
    edges = [0, *sorted(position % (len(text) + 1) for position in positions), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@given(stop_lists, texts, st.lists(st.integers(0, 30), max_size=8))
@settings(max_examples=400, deadline=None)
def test_equals_the_oracle_however_the_text_is_cut(stops: list[str], text: str, positions: list[int]) -> None:
    assert run(stops, cut(text, positions)) == naive(stops, text)


@given(stop_lists, texts)
@settings(max_examples=150, deadline=None)
def test_holds_back_only_what_can_become_a_stop_string(stops: list[str], text: str) -> None:
    matcher, sent, seen = StopMatcher(stops), "", ""
    for character in text:
        sent += matcher.push(character)
        seen += character
        if matcher.stopped:
            break
        ends = (seen[start:] for start in range(len(seen)))
        held = next((end for end in ends if any(stop.startswith(end) for stop in stops)), "")
        assert sent == seen.removesuffix(held)


@pytest.mark.parametrize(
    ("stop", "deltas", "flushed", "stopped"),
    [("DEFGHIJ", ["", "", "", ""], "", True), ("DEFGHIX", ["", "", "", "DEFGHIJ"], "", False)],
)
def test_the_beginning_of_a_stop_string_never_leaks(
    stop: str, deltas: list[str], flushed: str, stopped: bool
) -> None:
    detokenizer, matcher = Detokenizer(smollm2()), StopMatcher([stop])
    assert [matcher.push(detokenizer.push([i])) for i in (33203, 23960, 57, 58)] == deltas
    assert (matcher.flush(), matcher.stopped) == (flushed, stopped)


def test_text_that_only_began_a_stop_string_is_flushed_once() -> None:
    matcher = StopMatcher(["DEFGHIX"])
    assert matcher.push("abcDEF") == "abc"
    assert (matcher.flush(), matcher.flush()) == ("DEF", "")


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert run(["d", "abcd", "bcd"], ["xabcdx"]) == ("x", "abcd")


def test_a_match_may_begin_inside_one_that_failed() -> None:
    assert run(["aabaaax"], ["aabaaabaaax"]) == ("aaba", "aabaaax")


def test_after_a_stop_nothing_comes_out() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("end. more") == "end"
    assert (matcher.push("again"), matcher.flush()) == ("", "")


def test_without_stop_strings_text_passes() -> None:
    assert run([], ["a", "", "b"]) == ("ab", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(TextError, match="empty"):
        StopMatcher(["a", ""])


def test_a_long_stop_string_over_a_text_that_repeats() -> None:
    assert run(["a" * 20_000 + "b"], ["a" * 1000] * 30 + ["b", "c"]) == ("a" * 10_000, "a" * 20_000 + "b")
