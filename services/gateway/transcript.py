"""From tokens to text: what of an answer may be shown now, and where it ends.

    ids --Detokenizer--> text --StopMatcher--> text that may be shown

Both hold text back: the one bytes of a character that is not whole, the other what may become a stop string.
Tokens are taken one at a time, so text, end and counts never depend on how they were packed into messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from libs.text.detokenizer import Detokenizer
from libs.text.model import TextModel
from libs.text.stop import StopMatcher
from libs.wire.messages import Token

LEAST_LOGPROB: Final = -9999.0  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """`raw` is what the token adds to the text, in UTF-8; `label` is for people, and never empty."""

    label: str
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token whose text was shown. A stop string that cut the text also cut `chosen.raw`."""

    chosen: ScoredToken
    top: tuple[ScoredToken, ...]  # best first
    text_offset: int  # characters of the answer before it


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer. With logprobs on, `tokens` are those that the text is made of."""

    text: str
    tokens: tuple[ShownToken, ...] = ()


@dataclass(slots=True)
class _Pending:
    token: Token
    raw: bytes
    text: str
    start: int  # characters of the answer before its text, shown or not


class Transcript:
    """One answer's text. `end_ids` end it without being text themselves."""

    def __init__(
        self, model: TextModel, stops: Sequence[str], end_ids: Collection[int], *, logprobs: int | None
    ) -> None:
        self._model = model
        self._detokenizer = Detokenizer(model)
        self._stops = StopMatcher(stops)
        self._end_ids = frozenset(end_ids)
        self._logprobs = logprobs
        self._pending: deque[_Pending] = deque()
        self._num_decoded = 0  # characters that came out of the detokenizer
        self._num_shown = 0  # characters that came out of the stop matcher
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """A stop string was found: no token counts any more."""
        return self._stops.stopped

    @property
    def stop_string(self) -> str | None:
        """The one that was found."""
        return self._stops.matched

    def push(self, tokens: Sequence[Token]) -> Piece:
        """Takes tokens in, up to the one that completes a stop string; returns what may be shown of them."""
        shown: list[str] = []
        for token in tokens:
            if self.stopped:
                break
            self.num_tokens += 1
            text = "" if token.id in self._end_ids else self._detokenizer.push([token.id])
            self._note(token, text)
            shown.append(self._show(text))
        return self._piece("".join(shown))

    def finish(self) -> Piece:
        """What was held back, now that nothing follows."""
        text = ""
        if not self.stopped:
            tail = self._detokenizer.flush()
            self._num_decoded += len(tail)
            text = self._stops.push(tail) + self._stops.flush()
            self._num_shown += len(text)
        return self._piece(text, final=True)

    def _show(self, text: str) -> str:
        shown = self._stops.push(text)
        self._num_shown += len(shown)
        return shown

    def _note(self, token: Token, text: str) -> None:
        if self._logprobs is not None:
            raw = b"" if token.id in self._end_ids else self._model.token_bytes(token.id)
            self._pending.append(_Pending(token, raw, text, self._num_decoded))
        self._num_decoded += len(text)

    def _piece(self, text: str, *, final: bool = False) -> Piece:
        if self._logprobs is None or not (text or final):
            return Piece(text)
        tokens: list[ShownToken] = []
        while self._pending and self._is_shown(self._pending[0], final):
            tokens.append(self._shown(self._pending.popleft()))
        return Piece(text, tuple(tokens))

    def _is_shown(self, pending: _Pending, final: bool) -> bool:
        """A token goes out with its last character; at the end, all that the text has anything of."""
        if not final:
            # Of bytes that only later make a character, none is out before that character is.
            return pending.start + max(len(pending.text), 1) <= self._num_shown
        return pending.start < self._num_shown or not self.stopped

    def _shown(self, pending: _Pending) -> ShownToken:
        token, raw = pending.token, pending.raw
        if (hidden := pending.start + len(pending.text) - self._num_shown) > 0:
            raw = raw[: -len(pending.text[-hidden:].encode())]
        return ShownToken(
            chosen=self._scored(token.id, raw, token.logprob if token.logprob is not None else 0.0),
            top=tuple(
                self._scored(token_id, self._model.token_bytes(token_id), logprob)
                for token_id, logprob in token.top[: self._logprobs]
            ),
            text_offset=pending.start,
        )

    def _scored(self, token_id: int, raw: bytes, logprob: float) -> ScoredToken:
        label = readable(raw) if raw else self._model.token_text(token_id) or f"<{token_id}>"
        return ScoredToken(label, raw, max(logprob, LEAST_LOGPROB))


def readable(raw: bytes) -> str:
    """Text of a token, or its bytes spelt out where they are only a part of a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in raw)
