"""What an endpoint has to say about an answer, whichever way it goes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.gateway.api.errors import ApiError
from services.gateway.job import Outcome
from services.gateway.transcript import Piece


@dataclass(frozen=True, slots=True)
class Heading:
    """What every chunk of an answer repeats. `created` is in seconds since 1970."""

    request_id: str
    created: int
    model: str
    fingerprint: str
    include_usage: bool
    prompt_tokens: int


class Writer(Protocol):
    """Bytes of an answer in one API's words: a stream's events, or one JSON document."""

    def opening(self) -> bytes:
        """Events before the first text; they hold none."""
        ...

    def piece(self, piece: Piece) -> bytes: ...

    def closing(self, outcome: Outcome) -> bytes:
        """Events after the last text: why it ended, what it took, and that it is over."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that failed."""
        ...

    def whole(self, pieces: Sequence[Piece], outcome: Outcome) -> bytes:
        """The JSON of an answer that is not streamed."""
        ...
