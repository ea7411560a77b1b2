"""A lock file between processes of one machine."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_POLL_S: Final = 0.05


class LockTimeout(TimeoutError):
    """Another process has held the lock for longer than anybody wants to wait."""


@contextmanager
def file_lock(path: Path, wait_s: float, on_wait: Callable[[float], None]) -> Iterator[None]:
    """Holds `path` exclusively; the system takes it from a process that dies.

    `on_wait(seconds waited)` is called now and then while another process has it. Raises LockTimeout after `wait_s`,
    OSError where the file cannot be opened.
    """
    began_s = time.monotonic()
    with path.open("ab") as file:
        while not _taken(file.fileno()):
            waited_s = time.monotonic() - began_s
            if waited_s >= wait_s:
                raise LockTimeout(f"another process has held {path} for {wait_s:g} s")
            on_wait(waited_s)
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def every(seconds: float, say: Callable[[float], None]) -> Callable[[float], None]:
    """An `on_wait` that says it at once, and then each `seconds`."""
    next_s = 0.0

    def on_wait(waited_s: float) -> None:
        nonlocal next_s
        if waited_s >= next_s:
            next_s = waited_s + seconds
            say(waited_s)

    return on_wait
