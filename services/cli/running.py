"""Who owns a state directory: one `baton up` at a time, found by the others through its lock file."""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

LOCK_NAME = "up.lock"
_LOCK_TRIES = 10
_LOCK_RETRY_S = 0.05  # a reader holds a shared lock for an instant; an owner holds it for long


@dataclass(frozen=True, slots=True)
class Running:
    """A `baton up` that is alive."""

    pid: int
    nats_url: str
    address: str | None  # None: not ready yet


class StateDirBusy(Exception):
    """Another `baton up` uses the directory; `owner` is None while that one is just starting."""

    def __init__(self, state_dir: Path, owner: Running | None) -> None:
        who = "another `baton up`" if owner is None else f"`baton up` with process id {owner.pid}"
        where = f" at {owner.address}" if owner is not None and owner.address else ""
        super().__init__(
            f"{who}{where} already uses {state_dir}; stop it, or choose another directory with --state-dir"
        )
        self.owner = owner


class StateLock:
    """The lock file of a state directory, held from `acquire` to `release` or to the process's end."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._path = state_dir / "run" / LOCK_NAME
        self._fd: int | None = None

    def acquire(self) -> None:
        """Raises StateDirBusy, or OSError when the directory cannot be written."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for attempt in range(_LOCK_TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == _LOCK_TRIES - 1:
                    owner = _parse(os.pread(fd, 4096, 0))
                    os.close(fd)
                    raise StateDirBusy(self._state_dir, owner) from None
                time.sleep(_LOCK_RETRY_S)
        self._fd = fd
        os.ftruncate(fd, 0)

    def publish(self, running: Running) -> None:
        """Tells `find` where to look. The lock must be held."""
        assert self._fd is not None
        data = json.dumps(asdict(running)).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)

    def release(self) -> None:
        """Idempotent. The file stays: removing it would race with the next owner."""
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def find(state_dir: Path) -> Running | None:
    """The `baton up` that holds this directory now, or None. What a dead one left behind does not count."""
    try:
        fd = os.open(state_dir / "run" / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _parse(os.pread(fd, 4096, 0))
    else:
        return None
    finally:
        os.close(fd)


def _parse(data: bytes) -> Running | None:
    try:
        return Running(**json.loads(data))
    except (ValueError, TypeError):  # being written just now
        return None
