"""Models for the tests of `libs.text`: the embedded one, and small ones made by hand."""

from __future__ import annotations

from functools import cache

from libs.checkpoint.open import open_checkpoint, resolve_model
from libs.checkpoint.tokenizer_data import GgufTokenizer
from libs.text.build import build_vocabulary
from libs.text.model import TextModel
from libs.text.vocabulary import Vocabulary, byte_level_alphabet

IM_START, IM_END = 1, 2
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def smollm2() -> TextModel:
    return TextModel.from_checkpoint(open_checkpoint(resolve_model("smollm2")))


@cache
def smollm2_vocabulary() -> Vocabulary:
    return build_vocabulary(smollm2_data(), (IM_END,))


@cache
def smollm2_data() -> GgufTokenizer:
    data = open_checkpoint(resolve_model("smollm2")).tokenizer
    assert isinstance(data, GgufTokenizer)
    return data


def byte_level_data(
    *,
    pre: str = "gpt-2",
    merges: tuple[str, ...] = (),
    control: tuple[str, ...] = ("<s>", "</s>"),
    whole: tuple[str, ...] = (),
    normal: tuple[str, ...] = (),
    add_bos: bool = False,
) -> GgufTokenizer:
    """Control tokens first, then 256 bytes, results of merges, other normal tokens, user-defined ones."""
    pieces = [*byte_level_alphabet(), *("".join(merge.split(" ")) for merge in merges), *normal]
    return GgufTokenizer(
        model="gpt2",
        pre=pre,
        tokens=(*control, *pieces, *whole),
        token_types=(*[3] * len(control), *[1] * len(pieces), *[4] * len(whole)),
        scores=(),
        merges=merges,
        bos_id=0,
        eos_id=1,
        unk_id=None,
        add_bos=add_bos,
        add_space_prefix=False,
    )


def sentencepiece_data(*, with_bytes: bool = True, add_space_prefix: bool = True) -> GgufTokenizer:
    """`</s` and `>` are pieces, so only a careless merge list lets text spell the control token `</s>`."""
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)] if with_bytes else []
    characters = list("▁helo</s>0x41")
    characters = list(dict.fromkeys(characters))
    words = ["he", "ll", "hell", "hello", "▁hello", "</", "</s", "<0", "<0x", "<0x4", "<0x41", "▁▁"]
    return GgufTokenizer(
        model="llama",
        pre="default",
        tokens=("<unk>", "<s>", "</s>", *byte_pieces, *characters, *words),
        token_types=(2, 3, 3, *[6] * len(byte_pieces), *[1] * (len(characters) + len(words))),
        scores=(*[0.0] * (3 + len(byte_pieces) + len(characters)), *(-float(i) for i in range(len(words)))),
        merges=(),
        bos_id=1,
        eos_id=2,
        unk_id=0,
        add_bos=True,
        add_space_prefix=add_space_prefix,
    )


def text_model(data: GgufTokenizer, *, chat_template: str | None = None) -> TextModel:
    eos = (data.eos_id,) if data.eos_id is not None else ()
    return TextModel("toy", build_vocabulary(data, eos), chat_template=chat_template, eos_token_ids=eos)
