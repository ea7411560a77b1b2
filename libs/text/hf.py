"""A vocabulary from a Hugging Face folder's tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from libs.checkpoint.tokenizer_data import HfTokenizer
from libs.text.errors import UnsupportedTokenizer
from libs.text.vocabulary import (
    SPACE,
    ControlToken,
    Vocabulary,
    byte_level_bytes,
    keep_plain,
    missing_bytes,
    sentencepiece_bytes,
)

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def hf_vocabulary(data: HfTokenizer, eos_token_ids: Iterable[int]) -> Vocabulary:
    """Raises UnsupportedTokenizer, naming the file, for one that cannot be read or is neither byte-level nor
    SentencePiece."""
    path = data.tokenizer_json
    raw, description = _read(path)
    byte_level = _is_byte_level(path, description)
    tokenizer = _load(path, raw)
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    tokens = {token_id: token for token, token_id in vocab.items()}
    bos_id = vocab.get(_token_text(data.config.get("bos_token")) or "")
    # Asked before special tokens are switched off: what the file itself puts before a text.
    adds_bos = bos_id is not None and _adds_bos(data.config, tokenizer, bos_id)

    control = tuple(_control_tokens(data.config, description, vocab, tokens, eos_token_ids))
    texts = [token.text for token in control]
    keep_plain(tokenizer, texts)
    unknown = vocab.get(description["model"].get("unk_token") or "")
    unreachable = {token.token_id for token in control} | ({unknown} if unknown is not None else set())
    return Vocabulary(
        encoder=tokenizer,
        continuation=_continuation(path, description, tokenizer, texts),
        token_bytes=_token_bytes(tokens, description, frozenset(unreachable), byte_level),
        control_tokens=control,
        unreachable_ids=frozenset(unreachable),
        missing_bytes=missing_bytes(vocab) if byte_level else b"",
        bos_id=bos_id,
        add_bos=adds_bos,
        template_names={name: text for name in _NAMES if (text := _token_text(data.config.get(name)))},
        adds_leading_space=_adds_leading_space(tokenizer),
    )


def _read(path: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        raw = path.read_bytes()
        description = json.loads(raw)
    except (OSError, ValueError) as error:
        raise UnsupportedTokenizer(f"{path}: cannot be read: {error}") from error
    if not isinstance(description, dict) or not isinstance(description.get("model"), dict):
        raise UnsupportedTokenizer(f"{path}: is not a tokenizer.json: it has no model")
    return raw, description


def _load(path: Path, raw: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises bare Exception
        raise UnsupportedTokenizer(f"{path}: {error}") from error
    # Files saved from a training run carry these; a prompt must be neither cut nor padded in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _is_byte_level(path: Path, description: dict[str, Any]) -> bool:
    kinds = set(_kinds(description.get("decoder"), "decoders"))
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace"}:
        return False
    names = ", ".join(sorted(kinds)) or "none"
    raise UnsupportedTokenizer(f"{path}: decoder {names}; byte-level and SentencePiece ones are supported")


def _kinds(part: dict[str, Any] | None, children: str) -> Iterator[str]:
    if part is not None:
        yield part["type"]
        for child in part.get(children, ()):
            yield from _kinds(child, children)


def _token_text(value: object) -> str | None:
    """A special token in tokenizer_config.json is a string, or an object with the string in `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _adds_bos(config: dict[str, Any], tokenizer: Tokenizer, bos_id: int) -> bool:
    stated = config.get("add_bos_token")
    if isinstance(stated, bool):
        return stated
    return bool(tokenizer.encode("a", add_special_tokens=True).ids[:1] == [bos_id])


def _adds_leading_space(tokenizer: Tokenizer) -> bool:
    first = tokenizer.encode("a", add_special_tokens=False).tokens[:1]
    return first != [] and first[0].startswith((SPACE, "Ġ"))


def _control_tokens(
    config: dict[str, Any],
    description: dict[str, Any],
    vocab: dict[str, int],
    tokens: dict[int, str],
    eos_token_ids: Iterable[int],
) -> Iterator[ControlToken]:
    """Tokens that either file marks as special, and those that begin or end a text, marked or not."""
    declared = [*description.get("added_tokens", ()), *config.get("added_tokens_decoder", {}).values()]
    by_text = {entry["content"]: entry for entry in declared}
    special = {entry["content"] for entry in declared if entry.get("special")}
    special |= {text for name in ("bos_token", "eos_token") if (text := _token_text(config.get(name)))}
    special |= {tokens[token_id] for token_id in eos_token_ids if token_id in tokens}
    for text in sorted(special & vocab.keys(), key=vocab.__getitem__):
        entry = by_text.get(text, {})
        yield ControlToken(text, vocab[text], bool(entry.get("lstrip")), bool(entry.get("rstrip")))


def _token_bytes(
    tokens: dict[int, str], description: dict[str, Any], unreachable: frozenset[int], byte_level: bool
) -> tuple[bytes, ...]:
    added = {entry["id"] for entry in description.get("added_tokens", ())}  # spelt as they are
    spelling = byte_level_bytes if byte_level else sentencepiece_bytes
    table = [b""] * (max(tokens, default=-1) + 1)
    for token_id, token in tokens.items():
        if token_id not in unreachable:
            table[token_id] = token.encode() if token_id in added else spelling(token)
    return tuple(table)


def _continuation(
    path: Path, description: dict[str, Any], tokenizer: Tokenizer, control_texts: list[str]
) -> Tokenizer:
    """Metaspace with scheme `first` puts a space before the first word of a whole prompt only; pieces behind a
    control token are encoded on their own here, so they need a tokenizer that puts none."""
    pre = description.get("pre_tokenizer")
    if pre is None or pre.get("type") != "Metaspace" or pre.get("prepend_scheme") != "first":
        return tokenizer
    changed = {**description, "pre_tokenizer": {**pre, "prepend_scheme": "never"}}
    continuation = _load(path, json.dumps(changed).encode())
    keep_plain(continuation, control_texts)
    return continuation
