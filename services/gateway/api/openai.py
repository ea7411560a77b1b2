"""Requests of OpenAI's completion endpoints, as they come from outside.

One policy for every field, at any depth: a field this service knows is honoured or refused by name; a field
nobody knows is ignored; `null` means absent. Hints that change no text (`user`, `metadata`, `service_tier`,
`prediction`, ...) are among the ignored.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import CoreSchema, ValidationInfo, no_info_before_validator_function

from libs.text.chat import normalise_content
from libs.text.errors import TextError
from libs.wire.messages import Sampling

MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 64
MAX_MESSAGES: Final = 16384
MAX_TOKENS: Final = 2**31 - 1
_NO_CONTENT: Final = object()


@dataclass(frozen=True, slots=True)
class refuse:
    """A field that is known but not served: only the values that mean "off" pass."""

    allowed: tuple[Any, ...]
    hint: str = ""

    def _check(self, value: object) -> object:
        if any(type(value) is type(one) and value == one for one in self.allowed):
            return value
        raise PydanticCustomError("unsupported", "this value is not supported{hint}", {"hint": self.hint})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [*self.allowed, None], "description": "not served"}


def _stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise PydanticCustomError("stop_type", "must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError("too_many", f"at most {MAX_STOPS} stop strings, got {len(stops)}")
    return stops


def _prompt(value: object) -> object:
    """A string, one string in a list, token ids, or one list of them; a batch of several is refused."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    elif isinstance(value, list) and value and isinstance(value[0], (str, list)):
        raise PydanticCustomError("unsupported", "only one prompt per request is supported")
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise PydanticCustomError("prompt_type", "must be a string or a list of token ids")


Off = Annotated[Any, refuse((False, [], {}, ""))]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class Body(BaseModel):
    """Strict types, unknown fields ignored, null fields absent."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: object) -> object:
        if isinstance(data, dict):
            return {name: value for name, value in data.items() if value is not None}
        return data


class StreamOptions(Body):
    include_usage: bool = False


class ResponseFormat(Body):
    type: Annotated[str, refuse(("text",), "; only 'text' is")]


class Message(Body):
    """One turn of a conversation. `content` is text by the time it is read: parts are joined."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    tool_calls: Off = None
    function_call: Off = None
    audio: Off = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: object) -> object:
        """Content is the exception: an assistant's null is an empty turn, while no content at all is a mistake."""
        kept = super()._null_is_absent(data)  # type: ignore[operator]
        if isinstance(data, dict) and "content" in data and data["content"] is None:
            return {**kept, "content": _NO_CONTENT}
        return kept

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, value: object, info: ValidationInfo) -> str:
        try:
            return normalise_content(info.data.get("role", ""), None if value is _NO_CONTENT else value)
        except TextError as error:
            raise PydanticCustomError("content", "{problem}", {"problem": error.message}) from None


class Generation(Body):
    """What both endpoints share. `user` is accepted for the client's sake and used for nothing."""

    model: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    stop: Annotated[tuple[Stop, ...], Field(strict=False), BeforeValidator(_stops)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(strict=False, max_length=MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    n: Annotated[int, refuse((1,), "; only n=1 is")] = 1
    logit_bias: Off = None

    @field_validator("stream_options")
    @classmethod
    def _only_when_streaming(cls, value: StreamOptions, info: ValidationInfo) -> StreamOptions:
        if info.data.get("stream") is False:
            raise PydanticCustomError("without_stream", "is only allowed when stream is true")
        return value


class ChatRequest(Generation):
    """POST /v1/chat/completions"""

    messages: Annotated[tuple[Message, ...], Field(strict=False, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Off = None
    tool_choice: Annotated[Any, refuse(("none", "auto"))] = None
    functions: Off = None
    function_call: Annotated[Any, refuse(("none", "auto"))] = None
    response_format: ResponseFormat | None = None
    modalities: Annotated[Any, refuse((["text"],), "; only ['text'] is")] = None
    audio: Off = None
    web_search_options: Annotated[Any, refuse(())] = None
    reasoning_effort: Annotated[Any, refuse(("none",), "; this model does not reason")] = None
    verbosity: Annotated[Any, refuse(("medium",))] = None

    @field_validator("top_logprobs")
    @classmethod
    def _only_with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("logprobs") is False:
            raise PydanticCustomError("without_logprobs", "is only allowed when logprobs is true")
        return value


class CompletionRequest(Generation):
    """POST /v1/completions"""

    prompt: Annotated[str | list[int], BeforeValidator(_prompt)]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    suffix: Off = None
    best_of: Annotated[int, refuse((1,), "; only best_of=1 is")] = 1

    @field_validator("logprobs")
    @classmethod
    def _not_of_the_prompt(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("echo"):
            raise PydanticCustomError("unsupported", "logprobs of an echoed prompt are not supported")
        return value


def sampling_of(request: Generation, logprobs: int | None) -> Sampling:
    """The engine's terms: `top_p` 0 means the best token alone, `top_k` -1 means off, seeds are unsigned."""
    top_p, top_k = (1.0, 1) if request.top_p == 0 else (request.top_p, max(request.top_k, 0))
    return Sampling(
        temperature=request.temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=request.min_p,
        seed=secrets.randbits(64) if request.seed is None else request.seed % 2**64,
        repetition_penalty=request.repetition_penalty,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        logprobs=logprobs,
    )
