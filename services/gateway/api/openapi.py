"""The API as OpenAPI 3.1, made from the types that check requests and write answers.

Fields that are known and refused are in it, too, since the types name them: `docs/api.md` says which.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway.api import anthropic, messages, openai, responses, tokens
from services.gateway.api.errors import ErrorBody

_REF: Final = "#/components/schemas/"


@dataclass(frozen=True, slots=True)
class Route:
    """One operation. Requests are pydantic's models, answers msgspec's; `stream`: server-sent events on request."""

    method: str
    path: str
    summary: str
    request: type[BaseModel] | None
    answer: type[msgspec.Struct] | None
    stream: bool = False
    is_open: bool = False


ROUTES: Final = (
    Route("post", "/v1/chat/completions", "A chat (OpenAI)", openai.ChatRequest, responses.ChatCompletion, True),
    Route("post", "/v1/completions", "A completion (OpenAI)", openai.CompletionRequest, responses.TextCompletion, True),
    Route("post", "/v1/messages", "A message (Anthropic)", anthropic.MessagesRequest, messages.MessageAnswer, True),
    Route(
        "post", "/v1/messages/count_tokens", "Tokens of a conversation (Anthropic)",
        anthropic.Conversation, messages.TokenCount,
    ),
    Route("post", "/tokenize", "Ids of a text or a conversation", tokens.TokenizeRequest, tokens.Tokenized),
    Route("post", "/detokenize", "Text of ids", tokens.DetokenizeRequest, tokens.Detokenized),
    Route("get", "/v1/models", "The models that are served", None, responses.ModelList),
    Route("get", "/v1/models/{model}", "One model", None, responses.ModelCard),
    Route("get", "/health", "The process is alive", None, None, is_open=True),
    Route("get", "/ready", "A request would be served", None, None, is_open=True),
    Route("get", "/metrics", "Numbers for Prometheus", None, None),
    Route("get", "/openapi.json", "This document", None, None),
)  # fmt: skip


@cache
def document(version: str, model: str) -> bytes:
    """JSON. `version`: of Baton; `model`: the one that is served."""
    requests = [route.request for route in ROUTES if route.request is not None]
    answers = [route.answer for route in ROUTES if route.answer is not None]
    _, asked = models_json_schema([(kind, "validation") for kind in requests], ref_template=_REF + "{model}")
    _, answered = msgspec.json.schema_components(
        [*answers, ErrorBody, messages.ErrorEvent], ref_template=_REF + "{name}"
    )
    for schema in asked["$defs"].values():
        if "model" in schema["properties"]:
            schema["properties"]["model"] |= {"enum": [model]}
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Baton", "version": version},
            "paths": paths,
            "components": {
                "schemas": {**asked["$defs"], **answered},
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
            "security": [{"bearer": []}, {"x-api-key": []}, {}],  # {}: as long as there are no keys
        }
    )


def _operation(route: Route) -> dict[str, Any]:
    error: type[msgspec.Struct] = messages.ErrorEvent if route.path.startswith("/v1/messages") else ErrorBody
    content: dict[str, Any] = _json(route.answer) if route.answer is not None else {}
    if route.stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method} {route.path}",
        "responses": {
            "200": {"description": "The answer", **({"content": content} if content else {})},
            "default": {"description": "An error", "content": _json(error)},
        },
    }
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": _json(route.request)}
    if "{model}" in route.path:
        operation["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if route.is_open:
        operation["security"] = []
    return operation


def _json(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF + kind.__name__}}}
