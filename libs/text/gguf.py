"""A vocabulary from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum

from tokenizers import AddedToken, Tokenizer, models, normalizers

from libs.checkpoint.tokenizer_data import GgufTokenizer
from libs.text.errors import UnsupportedTokenizer
from libs.text.pretokenizers import word_rule
from libs.text.vocabulary import (
    SPACE,
    ControlToken,
    Vocabulary,
    byte_level_bytes,
    keep_plain,
    missing_bytes,
    sentencepiece_bytes,
)


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4  # always taken whole, wherever its text occurs
    UNUSED = 5
    BYTE = 6


def gguf_vocabulary(data: GgufTokenizer, eos_token_ids: Iterable[int]) -> Vocabulary:
    """Raises UnsupportedTokenizer for a tokenizer model or pre-tokenizer that is not known."""
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    builder = builders.get(data.model)
    if builder is None:
        raise UnsupportedTokenizer(f"the tokenizer model {data.model!r} is unknown; known are gpt2 and llama")
    vocab = {token: token_id for token_id, token in enumerate(data.tokens)}
    try:
        tokenizer = builder(data, vocab)
    except UnsupportedTokenizer:
        raise
    except Exception as error:  # the library raises bare Exception, for a merge of tokens that do not exist
        raise UnsupportedTokenizer(f"the merges do not fit the vocabulary: {error}") from error
    control_ids = _control_ids(data, eos_token_ids)
    _add_whole_tokens(
        tokenizer, [data.tokens[i] for i in _ids_of(data, TokenType.USER_DEFINED) - control_ids]
    )
    control = tuple(ControlToken(data.tokens[i], i) for i in sorted(control_ids))
    keep_plain(tokenizer, [token.text for token in control])
    unreachable = frozenset(control_ids | _ids_of(data, TokenType.UNKNOWN))
    return Vocabulary(
        encoder=tokenizer,
        continuation=tokenizer,  # a SentencePiece file means a space before each text, not only the first
        token_bytes=tuple(_token_bytes(data, unreachable)),
        control_tokens=control,
        unreachable_ids=unreachable,
        missing_bytes=missing_bytes(vocab) if data.model == "gpt2" else b"",
        bos_id=data.bos_id,
        add_bos=data.add_bos and data.bos_id is not None,
        template_names={name: data.tokens[i] for name, i in _named_ids(data) if i is not None},
        adds_leading_space=data.model == "llama" and data.add_space_prefix,
    )


def _byte_level(data: GgufTokenizer, vocab: dict[str, int]) -> Tokenizer:
    rule = word_rule(data.pre)
    merges = [_pair(merge) for merge in data.merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.whole_words))
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    if rule.compose:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    # A half may begin with a space that is no separator only in vocabularies that are not byte-level.
    left, separator, right = merge.partition(" ")
    if not separator or not left or not right or " " in right:
        raise UnsupportedTokenizer(f"the merge {merge!r} is not two tokens with one space between them")
    return left, right


def _sentencepiece(data: GgufTokenizer, vocab: dict[str, int]) -> Tokenizer:
    unknown = data.tokens[data.unk_id] if data.unk_id is not None else None
    merges = list(_merges_from_scores(data, vocab))
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    prefix = [normalizers.Prepend(SPACE)] if data.add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, spaces])
    return tokenizer


def _merges_from_scores(data: GgufTokenizer, vocab: dict[str, int]) -> Iterator[tuple[str, str]]:
    """SentencePiece joins the pair whose result scores best; BPE wants that as a list of pairs, best first.

    Only pieces of text are results: a byte or control token spelt out in a text must stay text.
    """
    pieces = {TokenType.NORMAL, TokenType.USER_DEFINED}
    ranked = sorted(
        (i for i, kind in enumerate(data.token_types) if kind in pieces and len(data.tokens[i]) > 1),
        key=lambda i: -data.scores[i],  # the sort is stable: equal scores stay in the order of the vocabulary
    )
    for token_id in ranked:
        piece = data.tokens[token_id]
        pairs = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        known = [(left, right) for left, right in pairs if left in vocab and right in vocab]
        yield from sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))


def _named_ids(data: GgufTokenizer) -> list[tuple[str, int | None]]:
    return [("bos_token", data.bos_id), ("eos_token", data.eos_id), ("unk_token", data.unk_id)]


def _control_ids(data: GgufTokenizer, eos_token_ids: Iterable[int]) -> set[int]:
    # Some files mark the token that ends a turn as a normal one; it must not be reachable from text either.
    named = {data.bos_id, data.eos_id, *eos_token_ids}
    return _ids_of(data, TokenType.CONTROL) | {token_id for token_id in named if token_id is not None}


def _add_whole_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts if text])


def _token_bytes(data: GgufTokenizer, unreachable: frozenset[int]) -> Iterator[bytes]:
    spelling = byte_level_bytes if data.model == "gpt2" else sentencepiece_bytes
    for token_id, (token, kind) in enumerate(zip(data.tokens, data.token_types, strict=True)):
        if token_id in unreachable:
            yield b""
        elif kind == TokenType.USER_DEFINED and data.model == "gpt2":
            yield token.encode()  # written as it is, not in the spelling of the others
        else:
            yield spelling(token)


def _ids_of(data: GgufTokenizer, kind: TokenType) -> set[int]:
    return {token_id for token_id, found in enumerate(data.token_types) if found == kind}
