"""FileStore: what a listing shows, and several processes at once."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from libs.store.file_store import FileStore
from libs.store.interface import ObjectGone, StoreError
from tests.store_contract import keys, listed, read
from tests.store_rig import FORMAT, fail, leftovers, make_chain

CHAIN = make_chain(1, 3)
ROUNDS = 300


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> FileStore:
    return FileStore(root)


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
    real = os.replace
    removed: list[Path] = []

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
