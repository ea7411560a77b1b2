"""Ids to text as they come, against decoding all at once and against the tokenizers library."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from libs.text.detokenizer import Detokenizer
from libs.text.model import TextModel
from tests.unit.text_cases import (
    IM_END,
    sentencepiece_data,
    smollm2,
    smollm2_data,
    smollm2_vocabulary,
    text_model,
)


@cache
def partial_ids() -> list[int]:
    """Tokens that are no UTF-8 by themselves."""
    return [i for i in range(smollm2().vocab_size) if not _is_utf8(smollm2().token_bytes(i))]


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


id_lists = st.lists(
    st.one_of(st.sampled_from(partial_ids()), st.integers(0, 49151), st.sampled_from([10813, 242, 218])),
    max_size=40,
)


def stream(model: TextModel, ids: list[int], sizes: list[int], *, at_start: bool = False) -> list[str]:
    detokenizer = Detokenizer(model, at_start=at_start)
    pieces, position = [], 0
    for size in [*sizes, len(ids)]:
        pieces.append(detokenizer.push(ids[position : position + size]))
        position += size
    return [*pieces, detokenizer.flush()]


def test_smollm2_has_313_partial_tokens() -> None:
    assert len(partial_ids()) == 313


@given(id_lists, st.lists(st.integers(0, 4), max_size=20))
@settings(max_examples=150, deadline=None)
def test_pieces_are_the_text_decoded_at_once(ids: list[int], sizes: list[int]) -> None:
    assert "".join(stream(smollm2(), ids, sizes)) == smollm2().decode(ids)


@given(id_lists)
@settings(max_examples=150, deadline=None)
def test_decoding_equals_the_library(ids: list[int]) -> None:
    tokens = [smollm2_data().tokens[i] for i in ids if i > 16]
    assert smollm2().decode(ids) == decoders.ByteLevel().decode(tokens)


@given(id_lists)
@settings(max_examples=100, deadline=None)
def test_no_piece_holds_half_a_character_or_waits_for_a_whole_one(ids: list[int]) -> None:
    detokenizer, data = Detokenizer(smollm2()), b""
    sent = ""
    for token_id in ids:
        sent += detokenizer.push([token_id])
        data += smollm2().token_bytes(token_id)
        # What is held back can only be the beginning of one character: at most three bytes.
        assert any(sent == data[: len(data) - held].decode(errors="replace") for held in range(4))


def test_an_emoji_comes_with_its_last_token() -> None:
    assert stream(smollm2(), [10813, 242, 218], [1, 1, 1]) == ["", "", "😀", "", ""]


def test_an_unfinished_character_is_flushed_once() -> None:
    detokenizer = Detokenizer(smollm2())
    assert detokenizer.push([19556, 10813, 242]) == "Hello"
    assert (detokenizer.flush(), detokenizer.flush()) == ("\ufffd", "")
    assert smollm2().decode([19556, 10813, 242]) == "Hello\ufffd"


def test_the_prompt_is_not_replayed() -> None:
    # The prompt was [19556, 905, 10813, 242], "Hello world" and half an emoji; 218 is its other half.
    detokenizer = Detokenizer(smollm2())
    assert detokenizer.push([218]) + detokenizer.push([905]) + detokenizer.flush() == "\ufffd world"


def test_control_tokens_have_no_text_and_do_not_cut_characters() -> None:
    assert stream(smollm2(), [10813, IM_END, 242, 218], [1, 1]) == ["", "", "😀", ""]


def test_a_token_is_looked_at_once() -> None:
    class Counting(TextModel):
        looks = 0

        def token_bytes(self, token_id: int) -> bytes:
            Counting.looks += 1
            return super().token_bytes(token_id)

    model = Counting("toy", smollm2_vocabulary())
    detokenizer = Detokenizer(model)
    for token_id in range(1000, 1500):
        detokenizer.push([token_id])
    detokenizer.flush()
    assert Counting.looks == 500


def test_sentencepiece_space_stays_in_a_continuation_and_goes_at_a_start() -> None:
    model = text_model(sentencepiece_data())
    ids = model.encode("hello hello")
    assert stream(model, ids, [1, 1]) == [" hello", " hello", "", ""]
    assert stream(model, ids, [1, 1], at_start=True) == ["hello", " hello", "", ""]
    assert "".join(stream(model, [2, *ids], [1, 1], at_start=True)) == model.decode([2, *ids], at_start=True)


def test_sentencepiece_bytes_join_to_characters() -> None:
    model = text_model(sentencepiece_data())
    assert stream(model, model.encode("é"), [1, 1, 1]) == [" ", "", "é", "", ""]
