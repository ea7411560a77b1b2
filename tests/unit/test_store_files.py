"""FileStore: whole objects or none, whatever the file system does. Rows 38 and 50 of the field's bugs."""

from __future__ import annotations

import errno
import os
import random
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from libs.store.file_store import FileStore
from libs.store.interface import ObjectDamaged, ObjectGone, Store, StoreError, StoreFull
from libs.store.objects import check_object
from tests.store_contract import CONTRACT, keys, read
from tests.store_rig import FORMAT, fail, leftovers, make_chain

CHAIN = make_chain(1, 3)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> FileStore:
    return FileStore(root)


@pytest.mark.parametrize("check", CONTRACT)
def test_it_is_a_store(check: Callable[[Store], None], root: Path) -> None:
    check(FileStore(root, sync=False))  # a thousand objects, some of them


def test_a_relative_root_is_refused() -> None:
    with pytest.raises(ValueError, match="absolute"):
        FileStore(Path("store"))


# ------------------------------------------------------------ writing


def test_objects_appear_whole_and_on_the_disk(
    store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes, fsync, rename, fsync of the folders with the new names: in this order."""
    calls: list[str] = []

    def note(name: str, real: Callable[..., Any]) -> None:
        def call(*args: Any, **options: Any) -> Any:
            if name == "replace":
                assert keys(store) == []
                assert Path(args[0]).stat().st_size == FORMAT.object_bytes(3)
            where = Path(f"/proc/self/fd/{args[0]}").readlink() if name == "fsync" else None
            calls.append(f"{name} {where.relative_to(root).parts[:1]}" if where else name)
            return real(*args, **options)

        monkeypatch.setattr(os, name, call)

    for name in ("writev", "fsync", "replace"):
        note(name, getattr(os, name))
    CHAIN.write(store)
    folder = CHAIN.key.split("/", 1)[0]
    tail = ["replace"] * calls.count("replace")  # one that finds no folder, one that does
    assert calls == ["writev", "fsync ('tmp',)", *tail, *[f"fsync ('{folder}',)"] * 3, "fsync ()"]
    assert leftovers(root) == []


def test_without_sync_nothing_waits_for_the_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", fail(errno.EIO))
    store = FileStore(root, sync=False)
    CHAIN.write(store)
    assert CHAIN.read(store, CHAIN.key) == CHAIN.data


def test_a_mount_that_cannot_sync_folders_is_good_enough(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "no")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    CHAIN.write(store)
    assert keys(store) == [CHAIN.key]


def test_short_writes_go_on(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    monkeypatch.setattr(os, "writev", lambda fd, views: os.write(fd, views[0][: rng.randint(1, 300)]))
    CHAIN.write(store)
    assert CHAIN.read(store, CHAIN.key) == CHAIN.data


def test_more_parts_than_one_call_takes(store: FileStore) -> None:
    data = random.Random(2).randbytes(5000)
    store.put(CHAIN.key, [data[at : at + 1] for at in range(5000)])
    assert read(store, CHAIN.key, *[(at, 1) for at in range(5000)]) == [
        data[at : at + 1] for at in range(5000)
    ]


def full_after_some_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [4000, 10, 0]

    def writev(fd: int, views: list[memoryview]) -> int:
        allowed = left.pop(0) if left else 0
        if not allowed:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(fd, b"".join(views)[:allowed])

    monkeypatch.setattr(os, "writev", writev)


def full_at_close(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.close

    def close(fd: int) -> None:
        folder = Path(f"/proc/self/fd/{fd}").readlink().parent.name
        real(fd)
        if folder == "tmp":
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "close", close)


@pytest.mark.parametrize(
    ("break_it", "kind"),
    [
        (full_after_some_bytes, StoreFull),
        (full_at_close, StoreFull),
        (lambda patch: patch.setattr(os, "fsync", fail(errno.ENOSPC)), StoreFull),
        (lambda patch: patch.setattr(os, "fsync", fail(errno.EIO)), StoreError),
        (lambda patch: patch.setattr(os, "replace", fail(errno.ENOSPC)), StoreFull),
        (lambda patch: patch.setattr(os, "replace", fail(errno.EACCES)), StoreError),
        (lambda patch: patch.setattr(os, "replace", fail(errno.ENOENT)), StoreError),  # for ever
        (lambda patch: patch.setattr(os, "mkdir", fail(errno.EDQUOT)), StoreFull),
        (lambda patch: patch.setattr(os, "open", fail(errno.EROFS)), StoreError),
        (lambda patch: patch.setattr(os, "stat", fail(errno.EIO)), StoreError),
        (lambda patch: patch.setattr(os, "writev", lambda fd, views: 0), StoreError),
    ],
)
def test_a_write_that_fails_leaves_nothing(
    store: FileStore,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    break_it: Callable[[pytest.MonkeyPatch], None],
    kind: type[StoreError],
) -> None:
    with monkeypatch.context() as patch:
        break_it(patch)
        with pytest.raises(StoreError) as caught:
            CHAIN.write(store)
    assert type(caught.value) is kind
    assert (keys(store), leftovers(root)) == ([], [])
    CHAIN.write(store)  # the disk has space again
    assert CHAIN.read(store, CHAIN.key) == CHAIN.data


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("may not mount a small tmpfs; the same failures are injected in other tests")
    yield disk
    subprocess.run(["umount", str(disk)], check=True, timeout=10)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    store = FileStore(small_disk)
    written: list[str] = []
    with pytest.raises(StoreFull):
        written.extend(make_chain(seed, 14).write(store).key for seed in range(100))
    assert 0 < len(written) < 100
    assert (keys(store), leftovers(small_disk)) == (sorted(written), [])
    assert all(check_object(store, key) == 14 for key in written)
    store.delete(written[0])
    make_chain(100, 14).write(store)


def test_an_object_that_is_there_is_left_and_touched(store: FileStore, root: Path) -> None:
    CHAIN.write(store)
    path = root / CHAIN.key
    os.utime(path, (1, 1))
    before = path.stat()
    CHAIN.write(store)
    assert path.stat().st_ino == before.st_ino
    assert path.stat().st_mtime > 1


def test_a_root_of_ours_is_private_and_another_stays_as_it_is(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "a" / "store", tmp_path / "theirs"
    theirs.mkdir(mode=0o755)
    for root in (ours, theirs):
        CHAIN.write(FileStore(root))
    assert (ours.stat().st_mode & 0o777, theirs.stat().st_mode & 0o777) == (0o700, 0o755)


def test_leftovers_go_when_they_are_old(store: FileStore, root: Path) -> None:
    assert store.remove_leftovers() == 0  # not even a root
    CHAIN.write(store)
    old, new, other = (root / "tmp" / name for name in (f"1-{'0' * 16}", f"2-{'f' * 16}", "somebody-elses"))
    for path in (old, new, other):
        path.write_bytes(b"half")
    for path in (old, other):
        os.utime(path, (time.time() - 3700,) * 2)
    (root / "tmp" / f"3-{'0' * 16}").mkdir()
    assert store.remove_leftovers() == 1
    assert (old.exists(), new.exists(), other.exists()) == (False, True, True)
    assert store.remove_leftovers(older_than_s=-60) == 1
    assert (new.exists(), other.exists()) == (False, True)
    assert keys(store) == [CHAIN.key]


# ------------------------------------------------------------ reading


def test_neighbours_are_read_with_one_call(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    CHAIN.write(store)
    calls, real = [], os.preadv

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        calls.append((offset, len(views)))
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    CHAIN.read(store, CHAIN.key)
    CHAIN.read(store, CHAIN.key, 1)
    assert calls == [(0, 4), (0, 1), (4096 + 256, 2)]


def test_short_reads_go_on(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    CHAIN.write(store)
    rng, real = random.Random(3), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][: rng.randint(1, 300)]], at))
    assert CHAIN.read(store, CHAIN.key) == CHAIN.data


@pytest.mark.parametrize("call", ["open", "preadv"])
@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EACCES, StoreError),
        (errno.EIO, StoreError),
        (errno.EMFILE, StoreError),
        (errno.ENOENT, ObjectGone),
        (errno.ESTALE, ObjectGone),  # NFS: another machine deleted it
    ],
)
def test_a_read_that_fails_says_why(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, call: str, number: int, kind: type[StoreError]
) -> None:
    CHAIN.write(store)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail(number))
        with pytest.raises(StoreError) as caught:
            CHAIN.read(store, CHAIN.key)
    assert type(caught.value) is kind
    assert CHAIN.read(store, CHAIN.key) == CHAIN.data


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_files_are_closed_whatever_happens(store: FileStore) -> None:
    CHAIN.write(store)
    before = num_open()
    for _ in range(5):
        CHAIN.read(store, CHAIN.key)
        CHAIN.write(store)
        with pytest.raises(ObjectDamaged):
            read(store, CHAIN.key, (0, 10_000))
        with pytest.raises(ObjectGone):
            read(store, make_chain(9, 1).key, (0, 1))
    assert num_open() == before


def test_a_reader_of_an_object_that_is_deleted_gets_all_of_it(
    store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CHAIN.write(store)
    real = os.preadv

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        store.delete(CHAIN.key)
        return real(fd, [views[0][:100]], offset)  # and again between two calls

    monkeypatch.setattr(os, "preadv", preadv)
    assert CHAIN.read(store, CHAIN.key) == CHAIN.data
    assert keys(store) == []
    with pytest.raises(ObjectGone):
        CHAIN.read(store, CHAIN.key)
