"""Objects as files under one folder: local NVMe, NFS, a 3FS mount. Several processes and machines may share it.

    <root>/tmp/<pid>-<random>                       being written, or left by a process that was killed
    <root>/<namespace>/<tenant>/<shard>/<stem>      an object: appears by a rename, whole

Nothing else is kept: the tree is the index, and the time of a file's last change is when its object was last used.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from libs.service.logs import get_logger
from libs.store.file_tree import NUM_FOLDERS, walk
from libs.store.interface import ObjectDamaged, ObjectGone, Piece, StoredObject, StoreError, StoreFull
from libs.store.key import is_key
from libs.store.vectored import read_all, runs, write_all

PAGE: Final = 1000
LEFTOVER_S: Final = 3600.0
TMP: Final = "tmp"
_RANDOM_BYTES: Final = 8
_TEMPORARY: Final = re.compile(rf"\d+-[0-9a-f]{{{2 * _RANDOM_BYTES}}}")
_RENAMES: Final = 10  # who loses the race against `delete` so often has another problem
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_GONE: Final = frozenset({errno.ENOENT, errno.ESTALE})  # ESTALE: on NFS, deleted by another machine
log = get_logger()


class FileStore:
    """`sync`: objects survive a power cut from the moment `put` returns. Without, those of the last seconds may be lost
    or come back damaged, which readers notice. Nothing is read or made before the first call.
    """

    def __init__(self, root: Path, *, sync: bool = True) -> None:
        if not root.is_absolute():
            raise ValueError(f"the folder of a store is an absolute path, not {root}")
        self.url = root.as_uri()
        self.num_unreadable = 0  # folders that the last listing could not read
        self._root = root
        self._tmp = root / TMP
        self._sync = sync

    # ------------------------------------------------------------ writing

    def put(self, key: str, parts: Sequence[bytes | memoryview]) -> None:
        """See Store. An object that is there and as long is left and touched; one of another length is replaced."""
        path = self._path(key)
        views = [memoryview(part).cast("B") for part in parts]
        try:
            if self._is_there(path, sum(map(len, views))):
                return
            temporary = self._write(views)
            try:
                self._move(temporary, path)
            except BaseException:
                _remove(temporary)
                raise
        except OSError as error:
            kind = StoreFull if error.errno in _FULL else StoreError
            raise kind(f"cannot write {path}: {error.strerror}") from error

    def _is_there(self, path: Path, num_bytes: int) -> bool:
        try:
            if path.stat().st_size != num_bytes:  # damaged
                return False
        except FileNotFoundError:
            return False
        self._touch(path)
        return True

    def _write(self, views: list[memoryview]) -> Path:
        """Path of a temporary file with these bytes; none is left where that fails."""
        path = self._tmp / f"{os.getpid()}-{secrets.token_hex(_RANDOM_BYTES)}"
        fd = self._create(path)
        try:
            try:
                write_all(fd, views)
                if self._sync:
                    os.fsync(fd)
            finally:
                os.close(fd)  # NFS tells of a full disk as late as here
        except BaseException:
            _remove(path)
            raise
        return path

    def _create(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o666)
        except FileNotFoundError:
            # Tokens are in there: a root that we make is ours alone. Who makes it beforehand decides who may read.
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._tmp.mkdir(exist_ok=True)
            return os.open(path, flags, 0o666)

    def _move(self, temporary: Path, path: Path) -> None:
        for attempt in itertools.count(1):
            try:
                temporary.replace(path)
                break
            except FileNotFoundError:  # no such folder yet, or `delete` removed it just now
                if attempt == _RENAMES:
                    raise
            with contextlib.suppress(FileNotFoundError, FileExistsError):  # removed while we made it
                path.parent.mkdir(parents=True, exist_ok=True)
        if self._sync:
            self._sync_folders(path.parent, is_new=attempt > 1)

    def _sync_folders(self, folder: Path, *, is_new: bool) -> None:
        """Puts the name of a new file on the disk, and those of the folders above it if they may be new."""
        while True:
            # Some mounts cannot do it. A name that a power cut takes is a miss, no damage.
            with contextlib.suppress(OSError):
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
            if not is_new or folder == self._root:
                return
            folder = folder.parent

    # ------------------------------------------------------------ reading

    def read(self, key: str, pieces: Sequence[Piece]) -> None:
        """See Store. Pieces that follow one another in the object are read with one call."""
        path = self._path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for offset, views in runs(pieces):
                    if not read_all(fd, offset, views):
                        raise ObjectDamaged(key, "short", "it ends too early")
            finally:
                os.close(fd)
        except OSError as error:
            kind = ObjectGone if error.errno in _GONE else StoreError
            raise kind(f"cannot read {path}: {error.strerror}") from error

    def touch(self, keys: Iterable[str]) -> None:
        """See Store."""
        for key in keys:
            if is_key(key):
                self._touch(self._root / key)

    def _touch(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # gone, of another user, or a file system that is read-only
            os.utime(path)

    # ------------------------------------------------------------ deleting

    def delete(self, key: str) -> None:
        """See Store. Folders that become empty go too; who writes into one at this moment makes it again."""
        path = self._path(key)
        try:
            path.unlink()
        except OSError as error:
            if error.errno not in _GONE:
                raise StoreError(f"cannot delete {path}: {error.strerror}") from error
        with contextlib.suppress(OSError):  # the first that is not empty ends it
            for folder in list(path.parents)[:NUM_FOLDERS]:
                folder.rmdir()

    def remove_leftovers(self, older_than_s: float = LEFTOVER_S) -> int:
        """Deletes what killed processes were writing; returns how many files. Never raises. Other files are not ours.

        `older_than_s`: longer than any write takes, clocks of other machines included.
        """
        before_s = time.time() - older_than_s
        num_removed = 0
        with contextlib.suppress(OSError), os.scandir(self._tmp) as entries:
            for entry in entries:
                if not _TEMPORARY.fullmatch(entry.name):
                    continue
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime <= before_s:
                        Path(entry).unlink()
                        num_removed += 1
        return num_removed

    def close(self) -> None:
        """Nothing is open between calls."""

    # ------------------------------------------------------------ listing

    def list(self) -> Iterator[list[StoredObject]]:
        """See Store. Folders below the root that cannot be read are left out, counted and logged."""
        unreadable: list[OSError] = []
        found = walk(self._root, unreadable)
        while page := list(itertools.islice(found, PAGE)):
            yield page
        if len(unreadable) != self.num_unreadable:  # says it once, not with each listing
            log.warning(
                "store.list: unreadable", num=len(unreadable), error=str(next(iter(unreadable), None))
            )
        self.num_unreadable = len(unreadable)

    def _path(self, key: str) -> Path:
        """Keys come over the wire: none may lead out of the root."""
        if not is_key(key):
            raise StoreError(f"{key[:300]!r} is no key of an object")
        return self._root / key


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
