"""Answers of Anthropic's Messages API, as their clients expect them.

message_start, then with the first text content_block_start, content_block_delta ..., content_block_stop,
message_delta (why it ended, usage), message_stop
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from services.gateway.api.errors import ApiError
from services.gateway.api.responses import Body
from services.gateway.api.writer import Heading
from services.gateway.job import Outcome
from services.gateway.transcript import Piece

StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]
_encode = msgspec.json.Encoder().encode
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesUsage(Body, frozen=True, kw_only=True):
    """`input_tokens` are those that were computed; the prompt's other ones came from the cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class TextBlock(Body, frozen=True, kw_only=True):
    type: Literal["text"] = "text"
    text: str


class MessageAnswer(Body, frozen=True, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: tuple[TextBlock, ...]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessageStart(Body, frozen=True, kw_only=True, tag="message_start", tag_field="type"):
    message: MessageAnswer


class BlockStart(Body, frozen=True, kw_only=True, tag="content_block_start", tag_field="type"):
    index: int = 0
    content_block: TextBlock = TextBlock(text="")


class TextDelta(Body, frozen=True, kw_only=True, tag="text_delta", tag_field="type"):
    text: str


class BlockDelta(Body, frozen=True, kw_only=True, tag="content_block_delta", tag_field="type"):
    index: int = 0
    delta: TextDelta


class BlockStop(Body, frozen=True, kw_only=True, tag="content_block_stop", tag_field="type"):
    index: int = 0


class StopDelta(Body, frozen=True, kw_only=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Body, frozen=True, kw_only=True, tag="message_delta", tag_field="type"):
    delta: StopDelta
    usage: MessagesUsage


class MessageStop(Body, frozen=True, kw_only=True, tag="message_stop", tag_field="type"):
    pass


class AnthropicError(Body, frozen=True, kw_only=True):
    type: str
    message: str


class ErrorEvent(Body, frozen=True, kw_only=True, tag="error", tag_field="type"):
    error: AnthropicError
    request_id: str


class TokenCount(Body, frozen=True, kw_only=True):
    input_tokens: int


class ModelInfo(Body, frozen=True, kw_only=True):
    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str  # RFC 3339


class ModelPage(Body, frozen=True, kw_only=True):
    data: tuple[ModelInfo, ...]
    has_more: bool = False
    first_id: str
    last_id: str


class MessagesWriter:
    """Implements `services.gateway.api.writer.Writer`."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self._has_text = False

    def opening(self) -> bytes:
        usage = MessagesUsage(input_tokens=self._heading.prompt_tokens)
        return _event(MessageStart(message=self._message((), None, None, usage)))

    def piece(self, piece: Piece) -> bytes:
        if not piece.text:
            return b""
        start = b"" if self._has_text else _event(BlockStart())
        self._has_text = True
        return start + _event(BlockDelta(delta=TextDelta(text=piece.text)))

    def closing(self, outcome: Outcome) -> bytes:
        stop = _event(BlockStop()) if self._has_text else b""
        delta = StopDelta(stop_reason=_stop_reason(outcome), stop_sequence=outcome.stop_string)
        return stop + _event(MessageDelta(delta=delta, usage=_usage(outcome))) + _event(MessageStop())

    def whole(self, pieces: Sequence[Piece], outcome: Outcome) -> bytes:
        text = "".join(piece.text for piece in pieces)
        blocks = (TextBlock(text=text),) if text else ()
        reason = _stop_reason(outcome)
        return _encode(self._message(blocks, reason, outcome.stop_string, _usage(outcome)))

    def failure(self, error: ApiError) -> bytes:
        return _event(_error_event(error, self._heading.request_id))

    def _message(
        self,
        content: tuple[TextBlock, ...],
        stop_reason: StopReason | None,
        stop_sequence: str | None,
        usage: MessagesUsage,
    ) -> MessageAnswer:
        return MessageAnswer(
            id=f"msg_{self._heading.request_id}",
            model=self._heading.model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=usage,
        )


def error_body(error: ApiError, request_id: str) -> bytes:
    """An answer that is an error."""
    return _encode(_error_event(error, request_id))


def _error_event(error: ApiError, request_id: str) -> ErrorEvent:
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return ErrorEvent(error=AnthropicError(type=kind, message=error.message), request_id=request_id)


def _event(body: Body) -> bytes:
    name = body.__struct_config__.tag
    return f"event: {name}\ndata: ".encode() + _encode(body) + b"\n\n"


def _usage(outcome: Outcome) -> MessagesUsage:
    return MessagesUsage(
        input_tokens=outcome.prompt_tokens - outcome.cached.tokens,
        cache_read_input_tokens=outcome.cached.tokens,
        output_tokens=outcome.completion_tokens,
    )


def _stop_reason(outcome: Outcome) -> StopReason:
    if outcome.stop_string is not None:
        return "stop_sequence"
    return "max_tokens" if outcome.finish_reason == "length" else "end_turn"
