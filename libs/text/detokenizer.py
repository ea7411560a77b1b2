"""Token ids to text, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from libs.text.model import TextModel


class Detokenizer:
    """Text of one stream of generated tokens. Each push costs the tokens it brings, whatever came before.

    It works on bytes: a character that several tokens share comes out with the last of them, and what the
    stream leaves unfinished becomes U+FFFD in `flush`. So all pieces together are `TextModel.decode` of all
    ids, however they were cut. It sees no prompt, so it cannot repeat one; a character that the prompt left
    unfinished stays unfinished.
    """

    def __init__(self, text_model: TextModel, *, at_start: bool = False) -> None:
        """`at_start`: the ids begin a text rather than continue one (see `TextModel.decode`)."""
        self._text_model = text_model
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_space = at_start and text_model.adds_leading_space

    def push(self, ids: Iterable[int]) -> str:
        """Text that is complete now. Control tokens have none."""
        return self._emit(b"".join(map(self._text_model.token_bytes, ids)), final=False)

    def flush(self) -> str:
        """What is left at the end of the stream; "" when called again."""
        return self._emit(b"", final=True)

    def _emit(self, data: bytes, *, final: bool) -> str:
        text = self._decoder.decode(data, final)
        if text and self._drops_space:
            self._drops_space = False
            return text.removeprefix(" ")
        return text
