"""Processes that are killed while they write, and several that write at once: a listing shows whole objects only."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from libs.store.file_store import FileStore
from libs.store.interface import ObjectGone
from libs.store.objects import check_object
from tests.store_contract import keys, listed
from tests.store_rig import make_chain

BLOCKS = 14
KILLS = 12
PREAMBLE = """
import os, sys, time
from pathlib import Path
from libs.store.file_store import FileStore
from tests.store_rig import make_chain

store = FileStore(Path(sys.argv[1]), sync=False)

def pause(*args):
    print("ready", flush=True)
    time.sleep(60)
"""
WRITE_MANY = (
    PREAMBLE
    + """
chains = [make_chain(int(sys.argv[2]) + index, 14) for index in range(50)]
print("ready", flush=True)
while True:
    for chain in chains:
        chain.write(store)
        store.delete(chain.key)
        chain.write(store)
"""
)
PAUSE_BEFORE_RENAME = (
    PREAMBLE
    + """
os.replace = pause
make_chain(1, 14).write(store)
"""
)
PAUSE_IN_WRITE = (
    PREAMBLE
    + """
real = os.writev

def writev(fd, views):
    if os.fstat(fd).st_size:
        pause()
    return real(fd, [b"".join(views)[:5000]])

os.writev = writev
make_chain(1, 14).write(store)
"""
)
PAUSE_AFTER_RENAME = (
    PREAMBLE
    + """
make_chain(1, 14).write(store)
pause()
"""
)
WRITE_SAME = (
    PREAMBLE
    + """
chain = make_chain(1, 14)
store = FileStore(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(100):
    chain.write(store)
    store.delete(chain.key)
chain.write(store)
"""
)
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def start(root: Path) -> Iterator[Start]:
    """Runs a program with the root and more arguments, and returns once it says that it is ready."""
    processes = []

    def start(program: str, *args: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(root), *args],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=10)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)


@pytest.mark.parametrize(
    ("program", "num_objects", "num_leftovers"),
    [(PAUSE_IN_WRITE, 0, 1), (PAUSE_BEFORE_RENAME, 0, 1), (PAUSE_AFTER_RENAME, 1, 0)],
    ids=["in write", "before rename", "after rename"],
)
def test_killed_at_a_known_point(
    start: Start, root: Path, program: str, num_objects: int, num_leftovers: int
) -> None:
    chain, store = make_chain(1, BLOCKS), FileStore(root)
    process = start(program)
    assert len(listed(store)) == num_objects  # also while the writer lives
    kill(process)
    assert len(listed(store)) == num_objects
    assert len(list((root / "tmp").iterdir())) == num_leftovers
    if not num_objects:
        with pytest.raises(ObjectGone):
            chain.read(store, chain.key)
    chain.write(store)
    assert chain.read(store, chain.key) == chain.data
    assert store.remove_leftovers(older_than_s=-60) == num_leftovers
    assert keys(store) == [chain.key]


def test_killed_at_any_point(start: Start, root: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, store = random.Random(seed), FileStore(root)
    for attempt in range(KILLS):
        process = start(WRITE_MANY, str(1000 * (attempt % 3)))  # some write what others left
        time.sleep(rng.uniform(0, 0.05))
        kill(process)
        assert all(check_object(store, key) == BLOCKS for key in keys(store))
    assert keys(store)
    left = len(list((root / "tmp").iterdir()))
    assert store.remove_leftovers(older_than_s=-60) == left <= KILLS


def test_two_processes_write_one_object(start: Start, root: Path) -> None:
    chain, store = make_chain(1, BLOCKS), FileStore(root)
    writers = [start(WRITE_SAME) for _ in range(2)]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    while any(writer.poll() is None for writer in writers):
        try:
            assert chain.read(store, chain.key) == chain.data
        except ObjectGone:
            continue
    assert [writer.returncode for writer in writers] == [0, 0]
    assert keys(store) == [chain.key]
    assert chain.read(store, chain.key) == chain.data
    assert list((root / "tmp").iterdir()) == []
