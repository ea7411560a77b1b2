"""Texts to compare models on, from a folder of files: plain text, JSON lines, both also gzipped."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from libs.wire.errors import BatonError

_SUFFIXES = (".txt", ".json", ".jsonl", ".txt.gz", ".json.gz", ".jsonl.gz")
_LEAST_CHARACTERS = 40  # of a string in JSON; shorter ones are names and numbers
_CHARACTERS_PER_TOKEN = 8  # more than any text has, so that a piece has tokens enough
_MOST_CHARACTERS = 1 << 20  # of one file: the rest of a large one adds nothing

Encode = Callable[[str], list[int]]


def choose(folder: Path, count: int, num_tokens: int, encode: Encode) -> list[list[int]]:
    """The first `num_tokens` token ids of `count` texts, from all files in turn; the same each time.

    `encode` raises BatonError for a text that its vocabulary cannot write; such a text is left out. Raises
    BatonError where the folder has fewer texts that are long enough.
    """
    files = sorted(path for path in folder.rglob("*") if path.name.endswith(_SUFFIXES))
    texts: list[list[int]] = []
    for turn in zip_longest(*(_pieces(path, num_tokens * _CHARACTERS_PER_TOKEN) for path in files)):
        for piece in turn:
            tokens = None if piece is None else _encoded(piece, encode)
            if tokens is not None and len(tokens) >= num_tokens:
                texts.append(tokens[:num_tokens])
                if len(texts) == count:
                    return texts
    raise BatonError(f"{folder} has {len(texts)} texts of {num_tokens} tokens; {count} are needed")


def strings(value: Any) -> Iterator[str]:
    """The long strings of a JSON document, in its order."""
    if isinstance(value, str):
        if len(value) >= _LEAST_CHARACTERS:
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings(each)


def _pieces(path: Path, num_characters: int) -> Iterator[str]:
    text = _read(path)
    for start in range(0, len(text) - num_characters + 1, num_characters):
        yield text[start : start + num_characters]


def _read(path: Path) -> str:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except OSError as error:
        raise BatonError(f"{path} cannot be read: {error}") from error
    text = raw.decode("utf-8", "replace")
    if ".json" in path.name:
        text = "\n".join(string for line in text.splitlines() for string in strings(_json(line)))
    return text[:_MOST_CHARACTERS]


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _encoded(piece: str, encode: Encode) -> list[int] | None:
    try:
        return encode(piece)
    except BatonError:
        return None
