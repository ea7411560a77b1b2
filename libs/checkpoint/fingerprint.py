"""Digests of large files, remembered so that a second start does not read them again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from libs.checkpoint.errors import CheckpointError

CACHE_FILE = "fingerprints.json"
_VERSION = b"baton.model/1"


class _Entry(msgspec.Struct, frozen=True):
    """A digest is valid while the file still has this size and these times."""

    size: int
    mtime_ns: int
    ctime_ns: int  # also changes where a copy keeps the modification time
    sha256: str


def fingerprint_files(files: Sequence[Path], cache_dir: Path) -> str:
    """SHA-256 (hex) over the digests of `files`, in order. Names and places of files do not count."""
    cache_file = cache_dir / CACHE_FILE
    known = _load(cache_file)
    fresh: dict[str, _Entry] = {}
    hasher = hashlib.sha256(_VERSION)
    for file in files:
        key = str(file.resolve())
        entry = _entry(file, known.get(key))
        if entry != known.get(key):
            fresh[key] = entry
        hasher.update(bytes.fromhex(entry.sha256))
    if fresh:
        # Another process may have written since: keep what it learned.
        _store(cache_file, _load(cache_file) | fresh)
    return hasher.hexdigest()


def _entry(file: Path, known: _Entry | None) -> _Entry:
    """The remembered entry if the file has not changed, else a new one."""
    try:
        with file.open("rb") as stream:
            # Taken before reading: a file that changes meanwhile does not match at the next look.
            status = os.fstat(stream.fileno())
            identity = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            if known is not None and (known.size, known.mtime_ns, known.ctime_ns) == identity:
                return known
            return _Entry(*identity, hashlib.file_digest(stream, "sha256").hexdigest())
    except OSError as error:
        raise CheckpointError(file, f"cannot be read: {error.strerror}") from error


def _load(cache_file: Path) -> dict[str, _Entry]:
    """What is remembered; nothing, where the file is absent or damaged: digests can be computed again."""
    try:
        entries = msgspec.json.decode(cache_file.read_bytes(), type=dict[str, _Entry])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return {key: entry for key, entry in entries.items() if _is_digest(entry.sha256)}


def _is_digest(text: str) -> bool:
    return len(text) == 64 and all(character in "0123456789abcdef" for character in text)


def _store(cache_file: Path, entries: dict[str, _Entry]) -> None:
    """Replace the file as a whole. A cache that cannot be written costs time at the next start, no more."""
    with contextlib.suppress(OSError):
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=cache_file.parent, prefix=CACHE_FILE)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(msgspec.json.encode(entries))
            Path(temporary).replace(cache_file)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
