"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from typing import Final

import msgspec
from pydantic import ValidationError

from libs.wire.errors import BatonError, Code, RequestRefused

INVALID: Final = "invalid_request_error"
DEFAULT_RETRY_AFTER_S: Final = 1.0

# What went wrong behind the gateway -> status, OpenAI's type.
_FAILURES: Final[dict[Code, tuple[int, str]]] = {
    Code.BAD_REQUEST: (400, INVALID),
    Code.CONTEXT_LENGTH_EXCEEDED: (400, INVALID),
    Code.CAPACITY_EXCEEDED: (400, INVALID),
    Code.OVERLOADED: (429, "rate_limit_error"),
    Code.NO_WORKER: (503, "service_unavailable_error"),
    Code.WORKER_LOST: (503, "service_unavailable_error"),
    Code.DRAINING: (503, "service_unavailable_error"),
    Code.KV_UNAVAILABLE: (503, "service_unavailable_error"),
    Code.MODEL_MISMATCH: (503, "service_unavailable_error"),
    Code.DEADLINE_EXCEEDED: (504, "timeout_error"),
    Code.ABORTED: (500, "server_error"),
    Code.BAD_MESSAGE: (500, "server_error"),
    Code.INTERNAL: (500, "server_error"),
}
_RETRY_LATER: Final = frozenset({429, 503})
# pydantic's kinds of error -> OpenAI's codes
_VALIDATION_CODES: Final = {"missing": "missing_required_parameter", "unsupported": "unsupported_parameter"}
# ... -> words that fit JSON better than pydantic's
_PROBLEMS: Final = {
    "missing": "this field is required",
    "model_type": "must be an object",
    "tuple_type": "must be a list",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorDetail


class ApiError(Exception):
    """An answer that is an error. `param` names the field at fault, in JavaScript's notation."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        allow: str | None = None,
        challenge: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.allow = allow  # methods, for a 405
        self.challenge = challenge  # for a 401

    def body(self) -> bytes:
        detail = ErrorDetail(message=self.message, type=self.kind, param=self.param, code=self.code)
        return msgspec.json.encode(ErrorBody(error=detail))

    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.allow is not None:
            headers["Allow"] = self.allow
        if self.challenge is not None:
            headers["WWW-Authenticate"] = self.challenge
        return headers


def invalid(param: str, problem: str, code: str = "invalid_value") -> ApiError:
    """A 400 whose message names the field."""
    return ApiError(400, f"{param}: {problem}", param=param, code=code)


def model_not_found(model: str) -> ApiError:
    return ApiError(
        404, f"The model {model[:200]!r} does not exist here", param="model", code="model_not_found"
    )


def from_validation(error: ValidationError) -> ApiError:
    """The first field at fault, in the order in which the fields are declared."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = path_of(first["loc"])
    problem = _PROBLEMS.get(first["type"], first["msg"])
    code = _VALIDATION_CODES.get(first["type"])
    if code is None:
        code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    message = f"{param}: {problem}" if param else problem
    return ApiError(400, message, param=param or None, code=code)


def path_of(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def from_failure(failure: BatonError, request_id: str) -> ApiError:
    """What a client is told of a failure behind the gateway. Internal ones keep their text to the logs."""
    status, kind = _FAILURES.get(failure.code, (500, "server_error"))
    message = failure.message
    if status == 500:
        message = f"the request failed inside the server; its id is {request_id}"
    retry_after_s: float | None = None
    if status in _RETRY_LATER:
        given = failure.retry_after_s if isinstance(failure, RequestRefused) else None
        retry_after_s = DEFAULT_RETRY_AFTER_S if given is None else given
    return ApiError(status, message, kind=kind, code=str(failure.code), retry_after_s=retry_after_s)


def unexpected(request_id: str) -> ApiError:
    """A bug: the text of the exception goes to the log, never to the client."""
    message = f"the request failed inside the server; its id is {request_id}"
    return ApiError(500, message, kind="server_error", code=str(Code.INTERNAL))
