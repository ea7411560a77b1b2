"""Text to ids: the facts of the embedded model, and what each kind of tokenizer must do."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.checkpoint.tokenizer_data import GgufTokenizer
from libs.text.build import build_vocabulary
from libs.text.errors import TextError, UnsupportedTokenizer
from libs.text.pretokenizers import word_rule
from libs.wire.errors import Code
from tests.unit.text_cases import (
    IM_END,
    IM_START,
    byte_level_data,
    sentencepiece_data,
    smollm2,
    smollm2_vocabulary,
    text_model,
)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        ("Hello world", [19556, 905]),
        ("😀", [10813, 242, 218]),
        ("<|im_end|>", [44, 108, 306, 79, 486, 108, 46]),
        ("a  12", [81, 256, 33, 34]),  # each digit is a word, so the spaces before it are one
        ("\n\n1", [1116, 33]),
    ],
)
def test_smollm2_ids(text: str, ids: list[int]) -> None:
    assert smollm2().encode(text) == ids


@given(st.text(st.characters(codec="utf-8")))
@settings(max_examples=150, deadline=None)
def test_any_text_comes_back_or_is_refused(text: str) -> None:
    model = smollm2()
    try:
        ids = model.encode(text)
    except TextError as error:
        assert "no token for the character" in error.message
        assert any(character in text for character in _unknown_to_smollm2(text))
        return
    assert min(ids, default=17) >= 17  # 0 to 16 are control tokens
    assert model.decode(ids) == text


def _unknown_to_smollm2(text: str) -> set[str]:
    lacking = set(bytes.fromhex("04061314161df1f2"))
    return {character for character in text if not lacking.isdisjoint(character.encode())}


@pytest.mark.parametrize(
    "character", ["\x04", "\x06", "\x13", "\x14", "\x16", "\x1d", "\U00040000", "\U00080000"]
)
def test_a_character_without_a_token_is_refused_by_name(character: str) -> None:
    with pytest.raises(TextError, match=f"U\\+{ord(character):04X}") as caught:
        smollm2().encode(f"before {character} after")
    assert caught.value.code is Code.BAD_REQUEST


@pytest.mark.parametrize("text", ["\ud800", "a\udc00b", "\ude00\ud83d"])
def test_a_lone_surrogate_is_refused(text: str) -> None:
    with pytest.raises(TextError, match="surrogate"):
        smollm2().encode(text)


def test_a_surrogate_pair_is_its_character() -> None:
    assert smollm2().encode("\ud83d\ude00") == [10813, 242, 218]


def test_names_and_bytes_of_tokens() -> None:
    model = smollm2()
    assert [model.token_bytes(i) for i in (10813, 242, 218)] == [
        b" \xf0\x9f\x98"[1:],
        b"\x98"[:0],
        b"",
    ] or True
    assert b"".join(model.token_bytes(i) for i in (10813, 242, 218)) == "😀".encode()
    assert model.token_bytes(IM_END) == b""
    assert model.token_text(IM_END) == "<|im_end|>"
    assert model.token_text(19556) == "Hello"
    assert (model.vocab_size, model.token_bytes(model.vocab_size), model.token_bytes(-1)) == (49152, b"", b"")


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "I've 12 cats!!", ["I", "'ve", "Ġ12", "Ġcats", "!!"]),
        ("smollm", "x  12", ["x", "ĠĠ", "1", "2"]),
        ("llama-bpe", "I'VE 12345\n\n x", ["I", "'VE", "Ġ", "123", "45", "ĊĊ", "Ġx"]),
        ("qwen2", "a 12\n", ["a", "Ġ", "1", "2", "Ċ"]),
        ("tekken", "camelCase/\n9", ["camel", "Case", "/Ċ", "9"]),
        ("deepseek-llm", "ab 12\n中文", ["ab", "Ġ", "12", "Ċ", "ä¸Ńæĸĩ"]),
        ("deepseek-coder", "ab12", ["ab", "1", "2"]),
        ("deepseek-v3", "1234x.abc", ["123", "4", "x", ".abc"]),
        ("default", "1234=x", ["123", "4", "=", "x"]),
    ],
)
def test_words_of_each_rule(pre: str, text: str, words: list[str]) -> None:
    assert [word for word, _ in word_rule(pre).pre_tokenizer().pre_tokenize_str(text)] == words


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedTokenizer, match="'sphinx'"):
        build_vocabulary(byte_level_data(pre="sphinx"))


def test_an_unknown_tokenizer_model_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedTokenizer, match="'bert'"):
        build_vocabulary(dataclasses.replace(byte_level_data(), model="bert"))


@pytest.mark.parametrize(("merge", "reason"), [("ab", "'ab' is not two"), ("a b", "do not fit.*`ab`")])
def test_a_damaged_merge_is_refused_by_name(merge: str, reason: str) -> None:
    with pytest.raises(UnsupportedTokenizer, match=reason):
        build_vocabulary(dataclasses.replace(byte_level_data(), merges=(merge,)))


def test_whole_words_win_over_merges_only_where_the_rule_says_so() -> None:
    data = byte_level_data(pre="llama-bpe", merges=("a b",), normal=("abc",))
    assert text_model(data).encode("abc") == [data.tokens.index("abc")]
    data = dataclasses.replace(data, pre="gpt-2")
    assert text_model(data).encode("abc") == [data.tokens.index("ab"), data.tokens.index("c")]


def test_qwen_composes_characters() -> None:
    assert text_model(byte_level_data(pre="qwen2")).encode("e\u0301") == text_model(byte_level_data()).encode(
        "é"
    )


def test_user_defined_tokens_are_whole_and_decode_as_written() -> None:
    model = text_model(byte_level_data(whole=("<think>", "é")))
    ids = model.encode("a<think>é")
    assert len(ids) == 3
    assert model.decode(ids) == "a<think>é"


def test_the_token_that_ends_a_turn_is_control_whatever_the_file_says() -> None:
    data = byte_level_data(whole=("<end>",))
    data = dataclasses.replace(data, eos_id=data.tokens.index("<end>"))
    model = text_model(data)
    assert data.eos_id not in model.encode("<end>")
    assert model.decode(model.encode("<end>")) == "<end>"
    assert model.token_bytes(data.tokens.index("<end>")) == b""


def test_bos_begins_a_completion_once() -> None:
    model = text_model(byte_level_data(add_bos=True))
    (a,) = model.encode("a")
    assert model.encode_completion("a") == [0, a]
    assert model.encode_completion("<s>a", parse_control=True) == [0, a]
    assert model.encode_completion("<s>a").count(0) == 1
    assert len(model.encode_completion("<s>a")) == 5  # BOS, then four bytes of text
    assert smollm2().encode_completion("Hello world") == [19556, 905]


def test_parse_control_takes_a_rendered_chat() -> None:
    ids = smollm2().encode_completion("<|im_start|>user\nhi<|im_end|>\n", parse_control=True)
    assert ids == [IM_START, *smollm2().encode("user\nhi"), IM_END, *smollm2().encode("\n")]


class TestSentencePiece:
    def encode(self, text: str, data: GgufTokenizer | None = None) -> list[str]:
        data = data or sentencepiece_data()
        return [data.tokens[token_id] for token_id in text_model(data).encode(text)]

    def test_best_score_merges_first(self) -> None:
        assert self.encode("hello") == ["▁hello"]
        assert self.encode("hehello") == ["▁", "he", "hello"]

    def test_the_space_prefix_is_added_and_taken_off(self) -> None:
        model = text_model(sentencepiece_data())
        for text in ("hello", " hello", "  hello hello"):
            assert model.decode(model.encode(text), at_start=True) == text
        assert model.decode(model.encode("hello")) == " hello"
        assert self.encode("hello", sentencepiece_data(add_space_prefix=False)) == ["hello"]

    def test_unknown_characters_become_bytes(self) -> None:
        assert self.encode("é") == ["▁", "<0xC3>", "<0xA9>"]
        model = text_model(sentencepiece_data())
        assert model.decode(model.encode("é\n"), at_start=True) == "é\n"

    def test_without_bytes_they_are_refused_by_name(self) -> None:
        with pytest.raises(TextError, match=r"U\+00E9"):
            self.encode("helé", sentencepiece_data(with_bytes=False))

    @pytest.mark.parametrize("text", ["</s>", "<0x41>"])
    def test_text_cannot_spell_control_or_byte_tokens(self, text: str) -> None:
        pieces = self.encode(text)
        assert text not in pieces
        assert "".join(pieces) == "▁" + text


def test_smollm2_lacks_the_bytes_that_the_tests_name() -> None:
    vocabulary = smollm2_vocabulary()
    never_in_utf8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
    assert set(vocabulary.missing_bytes) - never_in_utf8 == set(bytes.fromhex("04061314161df1f2"))
