"""/v1/chat/completions: from its request to an Order, and from pieces to its answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from libs.text.chat import ChatMessage
from libs.text.model import TextModel
from services.gateway.api.body import parse
from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.openai import ChatRequest, sampling_of
from services.gateway.api.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    TokenLogprob,
    TopLogprob,
    Usage,
    usage_of,
)
from services.gateway.api.writer import Heading
from services.gateway.job import Order, Outcome
from services.gateway.sse import DONE, event
from services.gateway.transcript import Piece, ShownToken

_encode = msgspec.json.Encoder().encode


def read_order(body: bytes) -> Order:
    """Raises ApiError or pydantic's ValidationError for what cannot be served."""
    request = ChatRequest.model_validate(parse(body))
    limit_field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    if None not in (request.max_tokens, request.max_completion_tokens):
        raise invalid("max_tokens", "give max_tokens or max_completion_tokens, not both")
    max_tokens = (
        request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    )
    if max_tokens == 0:
        raise invalid(limit_field, "must be at least 1")
    messages = [
        ChatMessage("system" if message.role == "developer" else message.role, message.content)
        for message in request.messages
    ]

    def tokenize(text: TextModel) -> list[int]:
        return text.encode_chat(messages)

    return Order(
        model=request.model,
        tokenize=tokenize,
        num_chars=sum(len(message.content) + 32 for message in messages),
        prompt_param="messages",
        max_tokens=max_tokens,
        max_tokens_param=limit_field,
        sampling=sampling_of(request, (request.top_logprobs or 0) if request.logprobs else None),
        stops=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        stream=request.stream,
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
    )


class ChatWriter:
    """Implements `services.gateway.api.writer.Writer`."""

    def __init__(self, heading: Heading, *, logprobs: bool) -> None:
        self._heading = heading
        self._logprobs = logprobs
        self._usage_so_far: UnsetType | None = None if heading.include_usage else UNSET

    def opening(self) -> bytes:
        return self._event(ChatChunkChoice(delta=Delta(role="assistant", content="")))

    def piece(self, piece: Piece) -> bytes:
        if not piece.text and not piece.tokens:
            return b""
        delta = Delta(content=piece.text)
        return self._event(ChatChunkChoice(delta=delta, logprobs=self._logprobs_of(piece.tokens)))

    def closing(self, outcome: Outcome) -> bytes:
        end = self._event(ChatChunkChoice(delta=Delta(), finish_reason=outcome.finish_reason))
        usage = self._event(None, usage_of(outcome)) if self._heading.include_usage else b""
        return end + usage + DONE

    def failure(self, error: ApiError) -> bytes:
        return event(error.body())

    def whole(self, pieces: Sequence[Piece], outcome: Outcome) -> bytes:
        heading = self._heading
        text = "".join(piece.text for piece in pieces)
        tokens = [token for piece in pieces for token in piece.tokens]
        choice = ChatChoice(
            message=AssistantMessage(content=text),
            logprobs=self._logprobs_of(tokens),
            finish_reason=outcome.finish_reason,
        )
        completion = ChatCompletion(
            id=f"chatcmpl-{heading.request_id}",
            created=heading.created,
            model=heading.model,
            system_fingerprint=heading.fingerprint,
            choices=(choice,),
            usage=usage_of(outcome),
        )
        return _encode(completion)

    def _event(self, choice: ChatChunkChoice | None, usage: Usage | None = None) -> bytes:
        heading = self._heading
        chunk = ChatChunk(
            id=f"chatcmpl-{heading.request_id}",
            created=heading.created,
            model=heading.model,
            system_fingerprint=heading.fingerprint,
            choices=(choice,) if choice is not None else (),
            usage=usage if usage is not None else self._usage_so_far,
        )
        return event(_encode(chunk))

    def _logprobs_of(self, tokens: Iterable[ShownToken]) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        return ChatLogprobs(content=tuple(_token_logprob(token) for token in tokens))


def _token_logprob(token: ShownToken) -> TokenLogprob:
    return TokenLogprob(
        token=token.chosen.label,
        logprob=token.chosen.logprob,
        bytes=tuple(token.chosen.raw),
        top_logprobs=tuple(
            TopLogprob(token=one.label, logprob=one.logprob, bytes=tuple(one.raw)) for one in token.top
        ),
    )
