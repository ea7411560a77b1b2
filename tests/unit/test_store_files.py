"""FileStore: whole objects or none, whatever the file system does. Rows 38 and 50 of the field's bugs."""

from __future__ import annotations

import errno
import os
import random
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from libs.store.file_store import FileStore
from libs.store.interface import ObjectDamaged, ObjectGone, Store, StoreError, StoreFull
from libs.store.objects import check_object
from tests.store_contract import CONTRACT, keys, listed, read
from tests.store_rig import FORMAT, make_chain

CHAIN = make_chain(1, 3)
ROUNDS = 300


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> FileStore:
    return FileStore(root)


def leftovers(root: Path) -> list[Path]:
    return list((root / "tmp").iterdir()) if (root / "tmp").exists() else []


def fail(number: int) -> Callable[..., Any]:
    def call(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("check", CONTRACT)
def test_it_is_a_store(check: Callable[[Store], None], store: FileStore) -> None:
    check(store)


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
    store, written = FileStore(small_disk), []
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
    old, new = root / "tmp" / "1-old", root / "tmp" / "2-new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 3700,) * 2)
    (root / "tmp" / "folder").mkdir()
    assert store.remove_leftovers() == 1
    assert (old.exists(), new.exists()) == (False, True)
    assert store.remove_leftovers(older_than_s=-60) == 1
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


# ------------------------------------------------------------ listing


def test_only_objects_are_listed(store: FileStore, root: Path) -> None:
    CHAIN.write(store)
    folder = (root / CHAIN.key).parent
    other = make_chain(2, 1).key
    (root / "README").write_text("x")
    (root / "tmp" / "1-2").write_text("x")
    (root / "lost+found").mkdir()
    (folder / "notes.txt").write_text("x")
    (folder / ".nfs0001").write_text("x")
    (folder / other.rsplit("/", 1)[1]).write_text("x" * 9)  # in another's shard
    (root / other).mkdir(parents=True)
    (root / ("0" * 16)).write_text("no folder")
    assert keys(store) == [CHAIN.key]
    assert store.num_unreadable == 0


def test_touched_is_used_now(store: FileStore, root: Path) -> None:
    CHAIN.write(store)
    os.utime(root / CHAIN.key, (5, 5))
    assert [each.used_s for each in listed(store)] == [5]
    store.touch([CHAIN.key])
    assert listed(store)[0].used_s > 5


def test_folders_that_cannot_be_read_are_left_out(
    store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = {make_chain(seed, 1, tenant=f"t{seed}").write(store).key for seed in range(4)}
    lost = sorted(chains)[1]
    real = os.scandir

    def scandir(path: str) -> Any:
        if str(path).startswith(str(root / lost.rsplit("/", 2)[0])):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(os, "scandir", scandir)
        for _ in range(3):
            assert set(keys(store)) == chains - {lost}
            assert store.num_unreadable == 1
    assert [(line["event"], line["num"]) for line in logs] == [
        ("store.list: unreadable", 1)
    ]  # once, not thrice
    assert set(keys(store)) == chains
    assert store.num_unreadable == 0


@pytest.mark.skipif(
    os.geteuid() == 0, reason="root reads every folder; the same is injected in the test above"
)
def test_folders_without_permission_are_left_out(store: FileStore, root: Path) -> None:
    chains = [make_chain(seed, 1, tenant=f"t{seed}").write(store).key for seed in range(2)]
    folder = (root / chains[0]).parent
    folder.chmod(0)
    try:
        assert keys(store) == [chains[1]]
        assert store.num_unreadable == 1
        with pytest.raises(StoreError) as caught:
            read(store, chains[0], (0, 1))
        assert type(caught.value) is StoreError
    finally:
        folder.chmod(0o700)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_root_that_cannot_be_read_is_no_empty_store(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    CHAIN.write(store)
    monkeypatch.setattr(os, "scandir", fail(number))
    with pytest.raises(StoreError, match="cannot list"):
        keys(store)


def test_a_root_that_vanishes_is_made_again(store: FileStore, root: Path) -> None:
    CHAIN.write(store)
    root.rename(root.with_name("away"))
    assert keys(store) == []
    store.delete(CHAIN.key)
    CHAIN.write(store)
    assert CHAIN.read(store, CHAIN.key) == CHAIN.data


# ------------------------------------------------------------ several at once


def test_folders_go_with_their_last_object(store: FileStore, root: Path) -> None:
    near, far = make_chain(1, 1), make_chain(2, 1, tenant="other")
    near.write(store)
    far.write(store)
    store.delete(near.key)
    assert not (root / near.key).parent.parent.exists()
    assert far.read(store, far.key) == far.data
    store.delete(far.key)
    assert [path.name for path in root.iterdir()] == ["tmp"]


def test_a_folder_that_goes_before_the_rename_is_made_again(
    store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = os.replace, []

    def replace(source: str, target: str) -> None:
        folder = Path(target).parent
        if folder.exists() and len(removed) < 3:
            folder.rmdir()
            removed.append(folder)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    CHAIN.write(store)
    assert len(removed) == 3
    assert CHAIN.read(store, CHAIN.key) == CHAIN.data


def test_writers_readers_and_deleters_of_one_object(root: Path) -> None:
    """Nobody ever sees a part of an object, and no writer fails because of a deleter."""
    errors: list[BaseException] = []
    outcomes: list[str] = []
    stop = threading.Event()

    def write() -> None:
        store = FileStore(root, sync=False)
        for _ in range(ROUNDS):
            CHAIN.write(store)

    def delete() -> None:
        store = FileStore(root)
        while not stop.is_set():
            store.delete(CHAIN.key)

    def look() -> None:
        store = FileStore(root)
        while not stop.is_set():
            try:
                assert CHAIN.read(store, CHAIN.key) == CHAIN.data
                outcomes.append("whole")
            except ObjectGone:
                outcomes.append("gone")
            assert set(keys(store)) <= {CHAIN.key}
            assert all(each.num_bytes == FORMAT.object_bytes(3) for each in listed(store))

    def guard(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=guard, args=(write,)) for _ in range(2)]
    others = [threading.Thread(target=guard, args=(work,)) for work in (delete, look)]
    for thread in (*writers, *others):
        thread.start()
    for thread in writers:
        thread.join(60)
    stop.set()
    for thread in others:
        thread.join(60)
    assert errors == []
    assert set(outcomes) <= {"whole", "gone"}
    assert leftovers(root) == []
    CHAIN.write(FileStore(root))
    assert keys(FileStore(root)) == [CHAIN.key]
