"""How much a store may hold."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

MIB: Final = 1 << 20
DEFAULT_SHARE: Final = 10  # of the file system
MAX_DEFAULT_BYTES: Final = 64 << 30


def capacity_bytes(url: str, store_mib: int | None) -> int:
    """`store_mib`, or a tenth of the file system that a local store is on, at most 64 GiB; 64 GiB elsewhere."""
    if store_mib is not None:
        return store_mib * MIB
    parts = urlsplit(url)
    if parts.scheme not in ("", "file"):
        return MAX_DEFAULT_BYTES
    folder = Path(unquote(parts.path))
    while not folder.exists():
        folder = folder.parent
    return min(MAX_DEFAULT_BYTES, shutil.disk_usage(folder).total // DEFAULT_SHARE)
