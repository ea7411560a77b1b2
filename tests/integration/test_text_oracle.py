"""Tokenisation against `transformers`, which reads the same GGUF file with code of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from libs.checkpoint.open import open_checkpoint, resolve_model
from libs.text.chat import ChatMessage
from libs.text.model import TextModel

pytestmark = [pytest.mark.model, pytest.mark.slow]

PIECES = (
    "The quick brown fox", "I'VE can't we'll", "don't", "naïve café", "Straße", "Ελληνικά", "Привет, мир!",
    "你好，世界", "日本語のテキスト", "한국어", "مرحبا بالعالم", "हिन्दी", "ไทย", "😀👍🏽", "👩‍👩‍👧‍👦", "🇺🇸", "½ ² ①",
    "def f(x):\n    return x ** 2\n", "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i];\n}", "SELECT * FROM t;",
    "{\"key\": [1, 2.5, null]}", "<div class='a'>&nbsp;</div>", "https://example.org/a?b=c#d", "$100,000.00",
    "2024-07-26", "3.14159", "0x1F", "e=mc^2", "\\frac{a}{b}", "----", "...", "!?", "«»", "“quoted”", "\u00a0",
    "\u200b", "\u2028", "\r\n", "\n\n\n", "\t", "    ", "  ", " ", "", "a" * 50, "e\u0301", "\x00\x01\x7f", "ﬁ", "𝔘𝔫𝔦",
    "\ufffd", "\ufeff",
)  # fmt: skip


def texts(count: int) -> Iterator[str]:
    rng = random.Random(20240726)
    for _ in range(count):
        yield "".join(
            rng.choice(PIECES) + rng.choice(("", " ", "  ", "\n")) for _ in range(rng.randrange(1, 8))
        )


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel.from_checkpoint(open_checkpoint(resolve_model("smollm2")))


@pytest.fixture(scope="module")
def oracle() -> Any:
    path = resolve_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # It knows no rule named `smollm` and cuts text as GPT-2 does. The model's own tokenizer.json makes each
    # digit a word before that, which matters where white space comes before a digit.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def test_200_texts(model: TextModel, oracle: Any) -> None:
    for text in texts(200):
        assert model.encode(text) == oracle.encode(text, add_special_tokens=False), repr(text)


def test_decoding(model: TextModel, oracle: Any) -> None:
    rng = random.Random(7)
    for _ in range(200):
        ids = [rng.randrange(model.vocab_size) for _ in range(rng.randrange(1, 20))]
        assert model.decode(ids) == oracle.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def test_chats(model: TextModel, oracle: Any) -> None:
    rng = random.Random(11)
    contents = list(texts(60))
    for start in range(0, 60, 4):
        roles = ["system"] * rng.randrange(2) + ["user", "assistant", "user"][: rng.choice((1, 3))]
        messages = [ChatMessage(role, contents[start + i]) for i, role in enumerate(roles)]
        wanted = oracle.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in messages],
            add_generation_prompt=True,
            return_dict=False,
        )
        assert model.encode_chat(messages) == wanted
