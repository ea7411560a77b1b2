"""Where a store is, as one string."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from libs.store.file_store import FileStore
from libs.store.interface import Store


def open_store(url: str) -> Store:
    """The store at `file:///absolute/path`, `/absolute/path` or `s3://bucket[/prefix]`. Raises ValueError otherwise.

    Nothing is read, written or connected to here: a store that cannot be reached says so with each call.
    """
    if url.startswith("/"):
        return FileStore(Path(url))
    parts = urlsplit(url)
    is_plain = not (parts.query or parts.fragment)
    if (
        parts.scheme == "file"
        and parts.netloc in ("", "localhost")
        and parts.path.startswith("/")
        and is_plain
    ):
        return FileStore(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc and is_plain:
        from libs.store.s3_store import S3Store  # not installed or loaded where files are enough

        return S3Store(url)
    raise ValueError(
        f"{url!r} names no store: use file:///absolute/path, /absolute/path or s3://bucket[/prefix]"
    )
