"""A request's body as JSON."""

from __future__ import annotations

import orjson

from services.gateway.api.errors import ApiError


def parse(body: bytes) -> dict[str, object]:
    """Raises ApiError for what is no JSON object; that includes half of a surrogate pair, NaN and broken UTF-8."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value
