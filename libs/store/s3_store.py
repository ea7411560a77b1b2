"""Objects in a bucket of an S3 service.

Endpoint and credentials come from the usual environment: AWS_ENDPOINT_URL (http is allowed), AWS_REGION,
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, or AWS_SKIP_SIGNATURE=true for a service without any.
A PUT is atomic there: whoever is killed meanwhile leaves nothing behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError

from libs.store.interface import ObjectDamaged, ObjectGone, Piece, StoredObject, StoreError, StoreFull
from libs.store.key import is_key

PAGE: Final = 1000
CONNECT_TIMEOUT_S: Final = 2.0
TIMEOUT_S: Final = 5.0
RETRY_S: Final = 2.0  # no attempt begins later than this behind the first
RETRIES: Final = 2
MAX_GAP_BYTES: Final = 1 << 20  # cheaper to fetch and drop than a request of its own
# obstore hands on neither status nor code of an answer, only its text.
_FULL: Final = ("507 Insufficient Storage", "QuotaExceeded", "StorageFull", "InsufficientStorage")
_SHORT: Final = ("416 Range Not Satisfiable", "InvalidRange")
_ERRORS: Final = (BaseError, OSError, ValueError)  # obstore raises built-in ones too


@dataclass(slots=True)
class Span:
    """Bytes `start` to `end` of an object, fetched at once, and the pieces in it."""

    start: int
    end: int
    pieces: list[Piece]

    def fill(self, data: memoryview) -> bool:
        """Copies into the pieces; False if `data`, which begins at `start`, ends before one of them does."""
        for offset, view in self.pieces:
            part = data[offset - self.start :][: len(view)]
            if len(part) < len(view):
                return False
            view[:] = part
        return True


class S3Store:
    """`s3://bucket[/prefix]`. Nothing is connected to before the first call.

    A call takes at most RETRY_S and `timeout_s`, which one request has for all its bytes.
    """

    def __init__(
        self, url: str, *, timeout_s: float = TIMEOUT_S, connect_timeout_s: float = CONNECT_TIMEOUT_S
    ) -> None:
        parts = urlsplit(url)
        prefix = parts.path.strip("/")
        if parts.scheme != "s3" or not parts.netloc:
            raise ValueError(f"{url!r}: use s3://bucket[/prefix]")
        self.num_unreadable = 0
        self.url = f"s3://{parts.netloc}/{prefix}".rstrip("/")
        self._bucket = obstore.store.S3Store(
            parts.netloc,
            prefix=prefix or None,
            config={"disable_bulk_delete": True},  # some services have none, and one key needs none
            client_options={
                "allow_http": True,
                "connect_timeout": timedelta(seconds=connect_timeout_s),
                "timeout": timedelta(seconds=timeout_s),
            },
            retry_config={
                "max_retries": RETRIES,
                "retry_timeout": timedelta(seconds=RETRY_S),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(seconds=1),
                    "base": 2,
                },
            },
        )

    def put(self, key: str, parts: Sequence[bytes | memoryview]) -> None:
        """See Store. An object that is there is replaced: the service notes that as its last use."""
        _check(key)
        try:
            obstore.put(self._bucket, key, b"".join(parts), use_multipart=False)
        except _ERRORS as error:
            kind = StoreFull if _says(error, _FULL) else StoreError
            raise kind(f"cannot write {self.url}/{key}: {_text(error)}") from error

    def read(self, key: str, pieces: Sequence[Piece]) -> None:
        """See Store. Pieces that lie close together come with one request, distant ones side by side."""
        _check(key)
        spans = _spans(pieces)
        try:
            parts = obstore.get_ranges(
                self._bucket,
                key,
                starts=[span.start for span in spans],
                ends=[span.end for span in spans],
                coalesce=0,  # obstore's own way of joining ranges panics over an object that is shorter
            )
        except FileNotFoundError as error:
            raise ObjectGone(f"cannot read {self.url}/{key}: {_text(error)}") from error
        except _ERRORS as error:
            if _says(error, _SHORT):
                raise ObjectDamaged(key, "short", "it ends too early") from error
            raise StoreError(f"cannot read {self.url}/{key}: {_text(error)}") from error
        if not all(span.fill(memoryview(part)) for span, part in zip(spans, parts, strict=True)):
            raise ObjectDamaged(key, "short", "it ends too early")

    def delete(self, key: str) -> None:
        """See Store."""
        _check(key)
        try:
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self._bucket, key)
        except _ERRORS as error:
            raise StoreError(f"cannot delete {self.url}/{key}: {_text(error)}") from error

    def list(self) -> Iterator[list[StoredObject]]:
        """See Store. `used_s` is when an object was written: S3 notes no use."""
        try:
            for page in obstore.list(self._bucket, chunk_size=PAGE):
                found = [
                    StoredObject(each["path"], each["size"], each["last_modified"].timestamp())
                    for each in page
                    if is_key(each["path"])
                ]
                if found:
                    yield found
        except _ERRORS as error:
            raise StoreError(f"cannot list {self.url}: {_text(error)}") from error

    def remove_leftovers(self) -> int:
        """None: an object appears whole, or not at all."""
        return 0

    def touch(self, keys: Iterable[str]) -> None:
        """Nothing: an object's time cannot be set, and copying it on itself costs more than it tells."""

    def close(self) -> None:
        """Connections close by themselves."""


def _spans(pieces: Sequence[Piece]) -> list[Span]:
    spans: list[Span] = []
    for offset, view in sorted(pieces, key=lambda piece: piece[0]):
        if not view.nbytes:
            continue
        if not spans or offset > spans[-1].end + MAX_GAP_BYTES:
            spans.append(Span(offset, offset, []))
        spans[-1].end = max(spans[-1].end, offset + view.nbytes)
        spans[-1].pieces.append((offset, view.cast("B")))
    return spans


def _check(key: str) -> None:
    if not is_key(key):
        raise StoreError(f"{key[:300]!r} is no key of an object")


def _says(error: Exception, words: tuple[str, ...]) -> bool:
    text = str(error)
    return any(word in text for word in words)


def _text(error: Exception) -> str:
    """The first line: what follows are internals of the client."""
    return str(error).partition("\n")[0][:500]
