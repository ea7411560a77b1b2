"""What the bus does to single messages: sizes, replies, and errors as replies and back. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

from nats.errors import (
    ConnectionClosedError,
    ConnectionDrainingError,
    FlushTimeoutError,
    OutboundBufferLimitError,
)

from libs.wire.codec import decode
from libs.wire.errors import BatonError, BusError, Code, RequestRefused
from libs.wire.messages import Message, Refused

M = TypeVar("M", bound=Message)


def wire_size(data: bytes, headers: Mapping[str, str]) -> int:
    """Bytes that the server holds against `max_payload`: the headers count too."""
    if not headers:
        return len(data)
    # "NATS/1.0\r\n", then "key: value\r\n" each, then "\r\n"
    return len(data) + 12 + sum(len(key) + len(value) + 4 for key, value in headers.items())


def decode_reply(data: bytes, kinds: tuple[type[M], ...]) -> M:
    """The reply. Raises RequestRefused when it is Refused, DecodeError when it is none of `kinds` either."""
    wanted = cast("tuple[type[Message], ...]", kinds)
    reply = decode(data, *wanted, *(() if Refused in wanted else (Refused,)))
    if isinstance(reply, Refused) and Refused not in wanted:
        raise RequestRefused(
            _code(reply.code), reply.message, retryable=reply.retryable, retry_after_s=reply.retry_after_s
        )
    return cast("M", reply)


def refusal(error: BatonError) -> Refused:
    """The reply that tells a requester of `error`."""
    retry_after_s = error.retry_after_s if isinstance(error, RequestRefused) else None
    # What a message quotes may hold lone surrogates, which no encoder takes.
    message = error.message.encode("utf-8", "replace").decode()
    return Refused(code=error.code, message=message, retryable=error.retryable, retry_after_s=retry_after_s)


def bus_error(subject: str, error: Exception) -> BusError:
    """An error of nats-py, in our words."""
    if isinstance(error, FlushTimeoutError | OutboundBufferLimitError):
        reason = "NATS does not take messages, and no more can wait here"
    elif isinstance(error, ConnectionClosedError | ConnectionDrainingError):
        reason = "the connection to NATS is closed"
    else:
        reason = str(error)
    return BusError(subject, f"cannot use {subject}: {reason}")


def _code(text: str) -> Code:
    try:
        return Code(text)
    except ValueError:  # from a newer peer
        return Code.INTERNAL
