"""Messages to bytes and back: MessagePack, strict in both directions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from libs.wire.errors import DecodeError
from libs.wire.messages import Message

T = TypeVar("T", bound=Message)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes, *kinds: type[T]) -> T:
    """The one message of `kinds` that `data` holds.

    Raises DecodeError, with the path of the offending field, for another kind, an unknown version,
    an unknown or missing field, a wrong type, or bytes that are no MessagePack.
    """
    try:
        message: T = _decoder(kinds).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise DecodeError(f"not a valid {wanted}: {error}") from error
    return message


@lru_cache(maxsize=64)
def _decoder(kinds: tuple[type[Message], ...]) -> msgspec.msgpack.Decoder[Any]:
    wanted: Any = kinds[0]
    for kind in kinds[1:]:
        wanted = wanted | kind
    return msgspec.msgpack.Decoder(wanted)
