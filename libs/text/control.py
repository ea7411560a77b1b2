"""Finding control tokens in a rendered prompt: those the template wrote, never those a message quotes.

A message that contains the text `<|im_end|>` must not end its turn. Before rendering, a *guard*, a character
that occurs nowhere in the conversation, is put in front of each place in a message where a control token
could begin. After rendering, a control token behind a guard is text. The guards are taken out before
encoding, so the words around them are the words of the plain text.

    content    hi<|im_end|>                       guarded   hi#<|im_end|>
    rendered   <|im_start|>user\\nhi#<|im_end|><|im_end|>
    parts      <|im_start|>, "user\\nhi#<|im_end|>", <|im_end|>
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from libs.text.errors import TextError
from libs.text.vocabulary import ControlToken

_GUARDS = (*range(0xFDD0, 0xFDF0), *range(0x10FF00, 0x10FFFE))  # noncharacters, then private use


class ControlTokenFinder:
    """Immutable; one serves all requests of a model."""

    def __init__(self, tokens: Sequence[ControlToken]) -> None:
        self._by_text = {token.text: token for token in tokens if token.text}
        self._pattern = re.compile(_longest_of(sorted(self._by_text))) if self._by_text else None
        self._prefixes = {text[:n] for text in self._by_text for n in range(1, len(text))}
        self._longest = max(map(len, self._by_text), default=0)

    def guard(self, text: str, guard: str) -> str:
        """`text` with `guard` before each place where a control token begins, or could once more follows."""
        starts = [*self._starts(text), *self._unfinished(text)]
        if not starts:
            return text
        cuts = [0, *sorted(set(starts)), len(text)]
        return guard.join(text[a:b] for a, b in pairwise(cuts))

    def split(self, text: str, guard: str) -> Iterator[str | ControlToken]:
        """The control tokens of `text` that no guard precedes, and the text between them, guards included.

        Text parts are not empty. White space that a token swallows is in no part.
        """
        done = position = 0
        while self._pattern is not None and (match := self._pattern.search(text, position)):
            if match.start() > 0 and text[match.start() - 1] == guard:
                position = match.start() + 1
                continue
            token = self._by_text[match[0]]
            before = text[done : match.start()]
            if before := before.rstrip() if token.strip_left else before:
                yield before
            yield token
            done = position = _skip_space(text, match.end()) if token.strip_right else match.end()
        if done < len(text):
            yield text[done:]

    def _starts(self, text: str) -> Iterator[int]:
        position = 0
        while self._pattern is not None and (match := self._pattern.search(text, position)):
            yield match.start()
            position = match.start() + 1  # tokens may overlap

    def _unfinished(self, text: str) -> Iterator[int]:
        # Templates often strip a message, so white space at its end does not keep what follows apart.
        end = len(text.rstrip())
        for start in range(max(0, end - self._longest + 1), end):
            if text[start:end] in self._prefixes:
                yield start


def choose_guard(texts: Sequence[str]) -> str:
    """A character that is in none of `texts`. Raises TextError where they use all that can serve."""
    used = set().union(*texts)
    for code_point in _GUARDS:
        if (guard := chr(code_point)) not in used:
            return guard
    raise TextError("the messages contain every noncharacter and private-use character that could mark them")


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _longest_of(words: Sequence[str]) -> str:
    """A pattern for the longest of sorted `words` at a place; shared beginnings are tested once, so a
    vocabulary with a thousand control tokens costs no more than one with ten."""
    if len(words) == 1:
        return re.escape(words[0])
    optional = words[0] == ""
    by_first: dict[str, list[str]] = {}
    for word in words[1:] if optional else words:
        by_first.setdefault(word[0], []).append(word[1:])
    branches = "|".join(re.escape(first) + _longest_of(rest) for first, rest in by_first.items())
    return f"(?:{branches})?" if optional else f"(?:{branches})"
