"""Vocabularies from Hugging Face folders, made here with the tokenizers library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from libs.checkpoint.tokenizer_data import HfTokenizer
from libs.text.build import build_vocabulary
from libs.text.chat import ChatMessage
from libs.text.errors import UnsupportedTokenizer
from libs.text.model import TextModel
from libs.text.pretokenizers import word_rule
from tests.unit.text_cases import smollm2, smollm2_data

WORDS = ["<unk>", "<s>", "</s>", *"▁abcx", "▁a", "[X]"]


def write(folder: Path, tokenizer: Tokenizer, **config: Any) -> HfTokenizer:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return HfTokenizer(path, config)


def metaspace(prepend_scheme: str) -> Tokenizer:
    vocab = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in WORDS[:3]])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Metaspace()])
    return tokenizer


def names(model: TextModel, ids: list[int]) -> list[str]:
    return [WORDS[i] for i in ids]


def test_a_folder_and_a_gguf_file_of_one_model_agree(tmp_path: Path) -> None:
    data = smollm2_data()
    vocab = {token: i for i, token in enumerate(data.tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in data.merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=data.tokens[0]))
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in data.tokens[:17]]
    )
    tokenizer.pre_tokenizer = word_rule("smollm").pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.enable_truncation(8)  # as files from training runs have it
    tokenizer.enable_padding(length=16)
    folder = write(tmp_path, tokenizer, bos_token="<|im_start|>", eos_token={"content": "<|im_end|>"})
    template = "{{ bos_token + messages[0].role + '\n' + messages[0].content + eos_token }}"
    model = TextModel("hf", build_vocabulary(folder, (2,)), chat_template=template)

    text = "def f(x):\n    return x ** 12  # <|im_end|> 😀 日本語 ½\n" * 3
    assert model.encode(text) == model.encode_completion(text) == smollm2().encode(text)
    assert model.encode("hi") == smollm2().encode("hi")
    assert model.vocab_size == smollm2().vocab_size
    assert all(model.token_bytes(i) == smollm2().token_bytes(i) for i in range(model.vocab_size))
    chat = model.encode_chat([ChatMessage("user", text)])
    assert chat == [1, *smollm2().encode("user\n" + text), 2]


def test_only_the_first_word_of_a_prompt_gets_a_space_where_the_file_says_first(tmp_path: Path) -> None:
    folder = write(tmp_path, metaspace("first"), bos_token="<s>", eos_token="</s>", add_bos_token=True)
    model = TextModel(
        "hf", build_vocabulary(folder), chat_template="{{ 'a' + eos_token + messages[0].content }}"
    )
    assert names(model, model.encode_completion("a")) == ["<s>", "▁a"]
    assert names(model, model.encode_chat([ChatMessage("user", "a")])) == ["<s>", "▁a", "</s>", "a"]
    assert model.decode(model.encode("a b"), at_start=True) == "a b"


def test_every_piece_gets_one_where_the_file_says_always(tmp_path: Path) -> None:
    folder = write(tmp_path, metaspace("always"), bos_token="<s>", eos_token="</s>")
    model = TextModel(
        "hf", build_vocabulary(folder), chat_template="{{ 'a' + eos_token + messages[0].content }}"
    )
    assert names(model, model.encode_chat([ChatMessage("user", "a")])) == ["▁a", "</s>", "▁a"]


def test_bos_as_the_file_itself_adds_it(tmp_path: Path) -> None:
    tokenizer = metaspace("always")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert build_vocabulary(write(tmp_path, tokenizer, bos_token="<s>")).add_bos
    assert not build_vocabulary(write(tmp_path, tokenizer, bos_token="<s>", add_bos_token=False)).add_bos
    assert not build_vocabulary(write(tmp_path, tokenizer)).add_bos  # no BOS named: nothing to add


def test_special_tokens_of_either_file_are_control_tokens(tmp_path: Path) -> None:
    decoder = {"9": {"content": "[X]", "special": True, "lstrip": True}}
    folder = write(tmp_path, metaspace("never"), bos_token="<s>", added_tokens_decoder=decoder)
    model = TextModel("hf", build_vocabulary(folder), chat_template="{{ 'a [X]' + messages[0].content }}")
    # The template's token swallows the space before it; the message's is text without tokens for brackets.
    assert names(model, model.encode_chat([ChatMessage("user", "b")])) == ["a", "[X]", "b"]
    assert model.token_bytes(9) == b""


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "cannot be read"),
        (b"[]", "has no model"),
        (
            json.dumps({"model": {"type": "Odd"}, "decoder": {"type": "ByteLevel"}}).encode(),
            "tokenizer.json: ",
        ),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UnsupportedTokenizer, match=reason) as caught:
        build_vocabulary(HfTokenizer(path, {}))
    assert str(path) in caught.value.message


def test_an_unknown_decoder_is_refused_by_name(tmp_path: Path) -> None:
    tokenizer = metaspace("never")
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(UnsupportedTokenizer, match="WordPiece"):
        build_vocabulary(write(tmp_path, tokenizer))
