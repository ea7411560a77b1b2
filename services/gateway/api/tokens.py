"""/tokenize and /detokenize, with the fields that vLLM's clients send."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from libs.text.chat import ChatMessage
from libs.text.model import TextModel
from libs.wire.messages import Sampling
from services.gateway.api.body import parse
from services.gateway.api.errors import invalid
from services.gateway.api.openai import MAX_MESSAGES, Body, Message, TokenId
from services.gateway.api.responses import Body as Answer
from services.gateway.job import Order

MAX_IDS = 1 << 20


class TokenizeRequest(Body):
    """POST /tokenize: a text, or a conversation. The model may be left out: there is one."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[tuple[Message, ...], Field(strict=False, max_length=MAX_MESSAGES)] = ()
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) != bool(self.messages):
            raise PydanticCustomError("prompt_or_messages", "give prompt or messages, and not both")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[tuple[TokenId, ...], Field(strict=False, max_length=MAX_IDS)]


class Tokenized(Answer, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: tuple[str, ...] | None


class Detokenized(Answer, frozen=True, kw_only=True):
    prompt: str


def read_tokenize(body: bytes) -> tuple[TokenizeRequest, Order]:
    """Raises ApiError or pydantic's ValidationError for what cannot be tokenised."""
    request = TokenizeRequest.model_validate(parse(body))
    messages = [
        ChatMessage("system" if message.role == "developer" else message.role, message.content)
        for message in request.messages
    ]

    def tokenize(text: TextModel) -> list[int]:
        if request.prompt is None:
            return text.encode_chat(messages, add_generation_prompt=request.add_generation_prompt)
        with_special = text.encode_completion if request.add_special_tokens else text.encode
        return with_special(request.prompt)

    num_chars = len(request.prompt or "") + sum(len(message.content) + 32 for message in messages)
    order = Order(
        model=request.model or "",
        tokenize=tokenize,
        num_chars=num_chars,
        prompt_param="messages" if messages else "prompt",
        max_tokens=None,
        max_tokens_param="",
        sampling=Sampling(),
    )
    return request, order


def read_detokenize(body: bytes) -> DetokenizeRequest:
    """Raises ApiError or pydantic's ValidationError."""
    return DetokenizeRequest.model_validate(parse(body))


def check_ids(ids: tuple[int, ...], text: TextModel) -> None:
    """Raises ApiError for an id that is no token."""
    for index, token_id in enumerate(ids):
        if token_id >= text.vocab_size:
            raise invalid(f"tokens[{index}]", f"token ids must be 0 to {text.vocab_size - 1}, not {token_id}")
