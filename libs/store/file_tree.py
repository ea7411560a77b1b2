"""The objects in a folder tree, as `file_store` lays it out."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from libs.store.interface import StoredObject, StoreError
from libs.store.key import is_key

_TAG: Final = re.compile("[0-9a-f]{16}")
_FOLDERS: Final = (_TAG, _TAG, re.compile("[a-z2-7]{2}"))  # of a key, from the root
NUM_FOLDERS: Final = len(_FOLDERS)


def walk(root: Path, unreadable: list[OSError]) -> Iterator[StoredObject]:
    """All objects below `root`. What cannot be read is left out and its error appended to `unreadable`.

    Raises StoreError where that is the root itself: an empty listing would say that all is gone.
    """
    return _walk(root, "", 0, unreadable)


def _walk(root: Path, prefix: str, depth: int, unreadable: list[OSError]) -> Iterator[StoredObject]:
    """Below `prefix`: the first `depth` folders of a key, with a slash behind each."""
    for entry in _entries(root, prefix, unreadable):
        name = prefix + entry.name
        if depth == NUM_FOLDERS:
            if is_key(name) and (stored := _stored(name, entry, unreadable)):
                yield stored
        elif _FOLDERS[depth].fullmatch(entry.name):
            yield from _walk(root, name + "/", depth + 1, unreadable)


def _entries(root: Path, prefix: str, unreadable: list[OSError]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(root / prefix) as entries:
            return list(entries)
    except FileNotFoundError:  # nothing was ever written, or deleted just now
        return []
    except OSError as error:
        if not prefix:
            raise StoreError(f"cannot list {root}: {error.strerror}") from error
        if error.errno not in (errno.ENOTDIR, errno.ESTALE):  # no folder of ours, or deleted just now
            unreadable.append(error)
        return []


def _stored(key: str, entry: os.DirEntry[str], unreadable: list[OSError]) -> StoredObject | None:
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        unreadable.append(error)
        return None
    return StoredObject(key, found.st_size, found.st_mtime) if stat.S_ISREG(found.st_mode) else None
