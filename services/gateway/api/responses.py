"""Answers of OpenAI's completion endpoints, as their clients expect them. UNSET fields are left out."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from libs.wire.messages import Cached, FinishReason
from services.gateway.job import Outcome


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all parts of answers."""


class CacheDetails(Body, frozen=True, kw_only=True):
    """Where cached tokens came from, and why the first token that had to be computed was not among them."""

    own_pool: int
    peer: int
    store: int
    miss: str | None


class PromptTokensDetails(Body, frozen=True, kw_only=True):
    """`baton_cache` is not OpenAI's: their clients pass over it."""

    cached_tokens: int
    baton_cache: CacheDetails


class Usage(Body, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Body, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: tuple[int, ...]


class TokenLogprob(Body, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobs(Body, frozen=True, kw_only=True):
    content: tuple[TokenLogprob, ...]
    refusal: None = None


class AssistantMessage(Body, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Body, frozen=True, kw_only=True):
    index: int = 0
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Body, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[ChatChoice, ...]
    usage: Usage


class Delta(Body, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Body, frozen=True, kw_only=True):
    index: int = 0
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(Body, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[ChatChunkChoice, ...]
    usage: Usage | UnsetType | None = UNSET


class TextLogprobs(Body, frozen=True, kw_only=True):
    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...]
    text_offset: tuple[int, ...]


class TextChoice(Body, frozen=True, kw_only=True):
    index: int = 0
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None


class TextCompletion(Body, frozen=True, kw_only=True):
    """Whole answers and chunks of a stream have the same shape here."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[TextChoice, ...]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Body, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "baton"
    max_model_len: int


class ModelList(Body, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: tuple[ModelCard, ...]


def usage_of(outcome: Outcome) -> Usage:
    return Usage(
        prompt_tokens=outcome.prompt_tokens,
        completion_tokens=outcome.completion_tokens,
        total_tokens=outcome.prompt_tokens + outcome.completion_tokens,
        prompt_tokens_details=_details(outcome.cached),
    )


def _details(cached: Cached) -> PromptTokensDetails:
    own = cached.tokens - cached.from_peer - cached.from_store
    where = CacheDetails(
        own_pool=own, peer=cached.from_peer, store=cached.from_store, miss=cached.miss or None
    )
    return PromptTokensDetails(cached_tokens=cached.tokens, baton_cache=where)
