"""What a model's tokenizer comes down to, whatever file described it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Tokenizer

SPACE = "▁"  # SentencePiece's visible space, U+2581


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token that only a template or the model itself may write, such as `<|im_end|>`."""

    text: str
    token_id: int
    strip_left: bool = False  # it swallows the white space before it
    strip_right: bool = False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Encoders and the bytes of every token.

    The encoders take text as plain text: they never look for control tokens. `encoder` is for text at the
    beginning of a prompt, `continuation` for text behind a control token; they differ only where the
    tokenizer puts a space before the first word.
    """

    encoder: Tokenizer
    continuation: Tokenizer
    token_bytes: tuple[bytes, ...]  # by id; b"" for control and unknown tokens, and for gaps
    control_tokens: tuple[ControlToken, ...]
    unreachable_ids: frozenset[int]  # plain text must never become one of these: control and unknown
    missing_bytes: bytes  # bytes that no token stands for; text with one of them cannot be encoded
    bos_id: int | None
    add_bos: bool  # a prompt begins with `bos_id`
    template_names: Mapping[str, str]  # what chat templates call tokens (`bos_token`), with their text
    adds_leading_space: bool  # encoding puts a space before the first word; decoding takes it off

    @property
    def size(self) -> int:
        return len(self.token_bytes)


def keep_plain(tokenizer: Tokenizer, control_texts: Iterable[str]) -> None:
    """From now on the text of a control token is encoded like any other text.

    The library skips only tokens that are registered as special, so they are registered first.
    """
    tokens = [AddedToken(text, special=True, normalized=False) for text in control_texts if text]
    tokenizer.add_special_tokens(tokens)
    tokenizer.encode_special_tokens = True


@cache
def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: character -> byte.

    Printable Latin-1 stands for itself; the other 68 bytes, in order, are U+0100 and up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(shifted)}


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a token in that spelling; a token that is not in it (an added one) is its own UTF-8."""
    alphabet = byte_level_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


def missing_bytes(vocab: dict[str, int]) -> bytes:
    """Bytes without a token of their own in a byte-level vocabulary.

    C0, C1 and F5 to FF occur in no UTF-8 text, so it does not matter whether they are listed.
    """
    return bytes(sorted(byte for character, byte in byte_level_alphabet().items() if character not in vocab))


def sentencepiece_bytes(piece: str) -> bytes:
    """Bytes of a SentencePiece piece: `▁` is a space, `<0x0A>` is one byte."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes.fromhex(piece[3:5])
        except ValueError:
            pass
    return piece.replace(SPACE, " ").encode()
