"""Anthropic's Messages API: requests as they come from outside, and what they mean to Baton.

The policy is that of `openai.py`: a field that is known is honoured or refused by name, an unknown one is ignored, null
means absent. `cache_control`, `metadata` and `service_tier` change no text: caching needs no marks here.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from libs.text.chat import ChatMessage, normalise_content
from libs.text.errors import TextError
from libs.text.model import TextModel
from libs.wire.messages import Sampling
from services.gateway.api.body import parse
from services.gateway.api.openai import MAX_MESSAGES, MAX_TOKENS, Body, Off, Stop, refuse
from services.gateway.job import Order

MAX_STOPS: Final = 64
Thinking = Annotated[object, refuse(({"type": "disabled"},), "; this model does not think")]


def _text(role: str, content: object) -> str:
    try:
        return normalise_content(role, content)
    except TextError as error:
        raise PydanticCustomError("content", "{problem}", {"problem": error.message}) from None


def _system(value: object) -> str:
    return _text("system", value) if value else ""


class Turn(Body):
    """One turn. `content` is text by the time it is read: blocks are joined."""

    role: Literal["user", "assistant"]
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, value: object, info: ValidationInfo) -> str:
        return _text(info.data.get("role", ""), value)


class Conversation(Body):
    """What both endpoints take: POST /v1/messages/count_tokens needs no more."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[tuple[Turn, ...], Field(strict=False, min_length=1, max_length=MAX_MESSAGES)]
    system: Annotated[str, BeforeValidator(_system)] = ""
    tools: Off = None
    tool_choice: Annotated[object, refuse(({"type": "auto"}, {"type": "none"}), "; there are no tools")] = (
        None
    )
    mcp_servers: Off = None
    thinking: Thinking = None
    output_config: Off = None
    output_format: Off = None


class MessagesRequest(Conversation):
    """POST /v1/messages. `seed` is Baton's: with it, the same request has the same answer."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    temperature: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    stop_sequences: Annotated[tuple[Stop, ...], Field(strict=False, max_length=MAX_STOPS)] = ()
    stream: bool = False
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    container: Off = None


def read_order(body: bytes) -> Order:
    """Raises ApiError or pydantic's ValidationError for what cannot be served."""
    request = MessagesRequest.model_validate(parse(body))
    return _order(
        request,
        max_tokens=request.max_tokens,
        sampling=Sampling(
            temperature=request.temperature,
            top_p=request.top_p or 1.0,
            top_k=request.top_k if request.top_p else 1,
            seed=secrets.randbits(64) if request.seed is None else request.seed % 2**64,
        ),
        stops=request.stop_sequences,
        stream=request.stream,
    )


def read_count(body: bytes) -> Order:
    """A request whose tokens are only counted. Raises as `read_order` does."""
    return _order(Conversation.model_validate(parse(body)))


def _order(
    request: Conversation,
    *,
    max_tokens: int | None = None,
    sampling: Sampling | None = None,
    stops: tuple[str, ...] = (),
    stream: bool = False,
) -> Order:
    """A last turn of the assistant is the beginning of the answer, which goes on from there."""
    messages = [ChatMessage("system", request.system)] if request.system else []
    messages += [ChatMessage(turn.role, turn.content) for turn in request.messages]
    begun = messages.pop().content if messages[-1].role == "assistant" else ""

    def tokenize(text: TextModel) -> list[int]:
        return text.encode_chat(messages, answer_begins=begun)

    return Order(
        model=request.model,
        tokenize=tokenize,
        num_chars=len(begun) + sum(len(message.content) + 32 for message in messages),
        prompt_param="messages",
        max_tokens=max_tokens,
        max_tokens_param="max_tokens",
        sampling=sampling or Sampling(),
        stops=stops,
        stream=stream,
    )
