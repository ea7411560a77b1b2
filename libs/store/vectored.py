"""Many buffers with few calls: what `writev` and `preadv` leave to their caller."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Final

from libs.store.interface import Piece

_MAX_VIEWS: Final = 1024  # Linux takes no more in one call (IOV_MAX)


def write_all(fd: int, views: list[memoryview]) -> None:
    """Appends all bytes of the views. Raises OSError."""
    while views := [view for view in views if len(view)]:
        num_bytes = os.writev(fd, views[:_MAX_VIEWS])
        if not num_bytes:
            raise OSError(errno.EIO, "no byte was written")
        views = _behind(views, num_bytes)


def read_all(fd: int, offset: int, views: list[memoryview]) -> bool:
    """Fills the views from `offset` on; False if the file ends before they are full. Raises OSError."""
    while views:
        num_bytes = os.preadv(fd, views[:_MAX_VIEWS], offset)
        if not num_bytes:
            return False
        views = _behind(views, num_bytes)
        offset += num_bytes
    return True


def runs(pieces: Sequence[Piece]) -> list[tuple[int, list[memoryview]]]:
    """Offset and views of pieces that lie side by side in the object."""
    found: list[tuple[int, list[memoryview]]] = []
    end = -1
    for offset, view in pieces:
        if not view.nbytes:
            continue
        if offset != end:
            found.append((offset, []))
        found[-1][1].append(view.cast("B"))
        end = offset + view.nbytes
    return found


def _behind(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of `views` behind their first `num_bytes` bytes."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []
