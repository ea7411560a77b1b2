"""Tokens to text: nothing depends on how tokens were packed, and logprobs belong to the text that was shown."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.wire.messages import Token
from services.gateway.transcript import Piece, ShownToken, Transcript, readable
from tests.gateway_rig import text_model

EOS = 2


def run(
    ids: Sequence[int], cuts: Sequence[int], stops: Sequence[str] = (), *, logprobs: int | None = 1
) -> tuple[str, list[ShownToken], int, bool]:
    """Text, shown tokens, number of tokens, and whether a stop string ended it, for one way to pack `ids`."""
    transcript = Transcript(text_model(), stops, [EOS], logprobs=logprobs)
    pieces: list[Piece] = []
    start = 0
    for end in [*sorted(cuts), len(ids)]:
        pieces.append(transcript.push([Token(id=i, logprob=-1.0) for i in ids[start:end]]))
        start = end
        if transcript.stopped:
            break
    pieces.append(transcript.finish())
    tokens = [token for piece in pieces for token in piece.tokens]
    return "".join(piece.text for piece in pieces), tokens, transcript.num_tokens, transcript.stopped


@cache
def partial_ids() -> list[int]:
    """Tokens that are no characters by themselves."""
    model = text_model()
    return [i for i in range(model.vocab_size) if "�" in model.token_bytes(i).decode(errors="replace")]


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    token = st.one_of(
        st.integers(0, 49151), st.sampled_from(partial_ids()), st.sampled_from([10813, 242, 218, 57, 58])
    )
    ids = draw(st.lists(token.filter(lambda i: i != EOS), max_size=20))
    return ids, draw(st.lists(st.integers(0, len(ids)), max_size=6))


@given(streams())
def test_text_is_the_one_shot_decode_and_every_token_is_listed(stream: tuple[list[int], list[int]]) -> None:
    ids, cuts = stream
    text, tokens, num_tokens, stopped = run(ids, cuts)
    assert text == text_model().decode(ids) and num_tokens == len(ids) and not stopped
    assert len(tokens) == len(ids)
    assert b"".join(token.chosen.raw for token in tokens).decode(errors="replace") == text
    assert (text, tokens, num_tokens, stopped) == run(ids, [])


@given(streams(), st.lists(st.sampled_from(["I", "IJ", "😀", "JJ", "GHI", "�"]), max_size=3))
def test_stop_strings_cut_the_same_however_tokens_come(
    stream: tuple[list[int], list[int]], stops: list[str]
) -> None:
    ids, cuts = stream
    text, tokens, num_tokens, stopped = run(ids, cuts, stops)
    assert (text, tokens, num_tokens, stopped) == run(ids, range(len(ids)), stops)
    assert not any(stop in text for stop in stops)
    full = text_model().decode(ids)
    assert full.startswith(text) and stopped == (text != full)
    if "�" not in full:
        assert b"".join(token.chosen.raw for token in tokens).decode() == text


def test_a_stop_string_cuts_the_token_it_begins_in() -> None:
    ids = [33203, 23960, 57, 58]  # DEF GH I J
    text, tokens, num_tokens, stopped = run(ids, [], ["FGH"])
    assert (text, num_tokens, stopped) == ("DE", 2, True)
    assert [token.chosen.raw for token in tokens] == [b"DE"] and tokens[0].chosen.label == "DE"


def test_the_end_token_is_listed_but_has_no_text() -> None:
    text, tokens, num_tokens, _ = run([57, EOS], [1])
    assert (text, num_tokens) == ("I", 2)
    assert [token.chosen.raw for token in tokens] == [b"I", b""]
    assert tokens[1].chosen.label == "<|im_end|>"


def test_tokens_of_one_character_come_with_it() -> None:
    transcript = Transcript(text_model(), [], [EOS], logprobs=0)
    emoji = [Token(id=i, logprob=-0.1 * n) for n, i in enumerate([10813, 242, 218])]
    assert transcript.push(emoji[:2]) == Piece("")
    piece = transcript.push(emoji[2:])
    assert piece.text == "😀" and len(piece.tokens) == 3
    assert [token.text_offset for token in piece.tokens] == [0, 0, 0]


@pytest.mark.parametrize("asked", [0, 1, 3])
def test_only_as_many_alternatives_as_were_asked_for(asked: int) -> None:
    transcript = Transcript(text_model(), [], [EOS], logprobs=asked)
    top = ((57, -0.1), (58, -2.0), (59, float("-inf")), (60, -9.0))
    (token,) = transcript.push([Token(id=57, logprob=-0.1, top=top)]).tokens
    assert len(token.top) == asked
    assert all(one.logprob >= -9999 for one in token.top)


def test_without_logprobs_nothing_is_listed() -> None:
    _, tokens, _, _ = run([57, 58], [], logprobs=None)
    assert tokens == []


def test_long_random_answers() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    ids = [chance.randrange(3, 49152) for _ in range(3000)]
    cuts = sorted(chance.sample(range(3000), 500))
    assert run(ids, cuts)[0] == text_model().decode(ids)


def test_labels_spell_out_bytes_that_are_no_text() -> None:
    assert readable(b"ok") == "ok" and readable(b"\xf0\x9f") == "\\xf0\\x9f"
