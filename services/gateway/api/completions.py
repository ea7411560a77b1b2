"""/v1/completions: from its request to an Order, and from pieces to its answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from libs.text.model import TextModel
from services.gateway.api.body import parse
from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.openai import CompletionRequest, sampling_of
from services.gateway.api.responses import TextChoice, TextCompletion, TextLogprobs, Usage, usage_of
from services.gateway.api.writer import Heading
from services.gateway.job import Order, Outcome
from services.gateway.sse import DONE, event
from services.gateway.transcript import Piece, ScoredToken, ShownToken

_encode = msgspec.json.Encoder().encode


def read_order(body: bytes) -> Order:
    """Raises ApiError or pydantic's ValidationError for what cannot be served."""
    request = CompletionRequest.model_validate(parse(body))
    prompt = request.prompt

    def tokenize(text: TextModel) -> list[int]:
        return text.encode_completion(prompt) if isinstance(prompt, str) else _checked(prompt, text)

    def prompt_text(text: TextModel) -> str:
        return prompt if isinstance(prompt, str) else text.decode(prompt, at_start=True)

    return Order(
        model=request.model,
        tokenize=tokenize,
        num_chars=len(prompt),
        prompt_param="prompt",
        max_tokens=request.max_tokens,
        max_tokens_param="max_tokens",
        sampling=sampling_of(request, request.logprobs),
        stops=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        stream=request.stream,
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
        echo=prompt_text if request.echo else None,
    )


def _checked(ids: list[int], text: TextModel) -> list[int]:
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < text.vocab_size:
            raise invalid(f"prompt[{index}]", f"token ids must be 0 to {text.vocab_size - 1}, not {token_id}")
    return ids


class CompletionWriter:
    """Implements `services.gateway.api.writer.Writer`."""

    def __init__(self, heading: Heading, *, logprobs: bool) -> None:
        self._heading = heading
        self._logprobs = logprobs
        self._usage_so_far: UnsetType | None = None if heading.include_usage else UNSET

    def opening(self) -> bytes:
        return b""

    def piece(self, piece: Piece) -> bytes:
        if not piece.text and not piece.tokens:
            return b""
        return self._event(TextChoice(text=piece.text, logprobs=self._logprobs_of(piece.tokens)))

    def closing(self, outcome: Outcome) -> bytes:
        end = self._event(TextChoice(text="", finish_reason=outcome.finish_reason))
        usage = self._event(None, usage_of(outcome)) if self._heading.include_usage else b""
        return end + usage + DONE

    def failure(self, error: ApiError) -> bytes:
        return event(error.body())

    def whole(self, pieces: Sequence[Piece], outcome: Outcome) -> bytes:
        choice = TextChoice(
            text="".join(piece.text for piece in pieces),
            logprobs=self._logprobs_of(token for piece in pieces for token in piece.tokens),
            finish_reason=outcome.finish_reason,
        )
        return _encode(self._completion((choice,), usage_of(outcome)))

    def _event(self, choice: TextChoice | None, usage: Usage | None = None) -> bytes:
        choices = (choice,) if choice is not None else ()
        return event(_encode(self._completion(choices, usage if usage is not None else self._usage_so_far)))

    def _completion(self, choices: tuple[TextChoice, ...], usage: Usage | UnsetType | None) -> TextCompletion:
        heading = self._heading
        return TextCompletion(
            id=f"cmpl-{heading.request_id}",
            created=heading.created,
            model=heading.model,
            system_fingerprint=heading.fingerprint,
            choices=choices,
            usage=usage,
        )

    def _logprobs_of(self, tokens: Iterable[ShownToken]) -> TextLogprobs | None:
        if not self._logprobs:
            return None
        shown = tuple(tokens)
        return TextLogprobs(
            tokens=tuple(_key(token.chosen) for token in shown),
            token_logprobs=tuple(token.chosen.logprob for token in shown),
            top_logprobs=tuple(_top(token) for token in shown),
            text_offset=tuple(token.text_offset for token in shown),
        )


def _top(token: ShownToken) -> dict[str, float]:
    """The best tokens, and always the chosen one."""
    return {_key(one): one.logprob for one in (*token.top, token.chosen)}


def _key(token: ScoredToken) -> str:
    try:
        token.raw.decode()
    except UnicodeDecodeError:
        return f"bytes:{token.label}"
    return token.label
