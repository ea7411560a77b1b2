"""Log files of supervised processes: appended to by the process, kept short by the supervisor."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import BinaryIO, TextIO

MAX_BYTES = 64 * 1024 * 1024
_TAIL_BYTES = 32 * 1024
_FRAME = ("timestamp", "logger", "service", "instance", "trace_id", "span_id")  # says where, not what


def open_log(path: Path) -> BinaryIO:
    """For appending: a restarted process continues the file of the one that crashed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab", buffering=0)


def fresh_log(path: Path) -> TextIO:
    """A new file for this process's own lines."""
    rotate(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a", buffering=1)


def rotate(path: Path) -> None:
    """Starts a new file; the last run's becomes `<name>.1`, older ones go."""
    with contextlib.suppress(FileNotFoundError):
        path.replace(_previous(path))


def shorten(path: Path, max_bytes: int = MAX_BYTES) -> None:
    """Moves the content of a too long file to `<name>.1`, while its writer keeps it open (it appends)."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > max_bytes:
            shutil.copyfile(path, _previous(path))
            with path.open("r+b") as file:
                file.truncate(0)


def tail(path: Path, max_lines: int) -> list[str]:
    """The last lines, oldest first; none when there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-max_lines:]


def readable(line: str) -> str:
    """A log line for people: a JSON object becomes `level: event, name=value ...` and its traceback."""
    try:
        entry = json.loads(line)
        text = f"{entry.pop('level', 'info')}: {entry.pop('event')}"
    except (ValueError, KeyError, AttributeError, TypeError):  # not one of ours: as it is
        return line
    traceback = entry.pop("exception", "")
    values = (f"{name}={value}" for name, value in entry.items() if name not in _FRAME)
    return ", ".join([text, *values]) + (f"\n{traceback}" if traceback else "")


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".1")
