"""Messages to bytes and back: MessagePack. Decoding is strict; encoding trusts the type checker."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from libs.wire.errors import DecodeError
from libs.wire.messages import Message

T = TypeVar("T", bound=Message)
_encoder = msgspec.msgpack.Encoder()


class _Nothing(Message, frozen=True, kw_only=True, tag="nothing/0", forbid_unknown_fields=False):
    """Makes every decoder's type a union: a decoder of one kind alone would accept a missing version tag."""


def encode(message: Message) -> bytes:
    """Raises TypeError, ValueError or OverflowError for values that MessagePack cannot hold."""
    return _encoder.encode(message)


def decode(data: bytes, *kinds: type[T]) -> T:
    """The one message of `kinds` that `data` holds.

    Raises DecodeError, with the path of the offending field, for another kind, an unknown version,
    an unknown or missing field, a wrong type, or bytes that are no MessagePack.
    """
    try:
        message: T = _decoder(kinds).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not a valid {_names(kinds)}: {error}") from error
    if isinstance(message, _Nothing):
        raise DecodeError(f"not a valid {_names(kinds)}: Invalid value 'nothing/0' - at `$.type`")
    return message


@lru_cache(maxsize=64)
def _decoder(kinds: tuple[type[Message], ...]) -> msgspec.msgpack.Decoder[Any]:
    wanted: Any = _Nothing
    for kind in kinds:
        wanted = wanted | kind
    return msgspec.msgpack.Decoder(wanted)


def _names(kinds: tuple[type[Message], ...]) -> str:
    return " or ".join(kind.__name__ for kind in kinds)
