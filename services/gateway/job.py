"""A request after validation (`Order`), and after tokenisation (`Job`): the same for every HTTP API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libs.text.model import TextModel
from libs.wire.messages import Cached, FinishReason, Limits, Sampling


@dataclass(frozen=True, slots=True)
class Order:
    """What a client asked for, in terms of no API. `*_param` are the names of its fields, for messages."""

    model: str
    tokenize: Callable[[TextModel], Sequence[int]]
    num_chars: int  # that `tokenize` has to read
    prompt_param: str
    max_tokens: int | None  # None: as many as fit
    max_tokens_param: str
    sampling: Sampling
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    echo: Callable[[TextModel], str] | None = None  # the prompt's text, to be put before the answer


@dataclass(frozen=True, slots=True)
class Job:
    """What the workers will be asked for. Times are ns since 1970."""

    request_id: str
    tenant: str
    prompt: tuple[int, ...]
    sampling: Sampling
    limits: Limits
    stops: tuple[str, ...]
    arrived_ns: int
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an answer ended, and what it took. `cached` of the prompt were not computed."""

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached: Cached
    stop_string: str | None = None  # of the client's, that ended it
