"""The frame of a process: what signals, results and crashes make of its exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30

PROGRAM = """
import asyncio, sys, time
from libs.service import logs, process
from libs.service.config import Settings

logs.configure("decode", "d1", Settings())

async def stops(stop):
    print("up", flush=True)
    await stop.wait()
    print("drained", flush=True)

async def drains_for_ever(stop):
    print("up", flush=True)
    await stop.wait()
    print("draining", flush=True)
    await asyncio.sleep(3600)

async def is_stuck(stop):
    print("up", flush=True)
    while True:
        time.sleep(0.1)

async def crashes(stop):
    raise ValueError("on purpose")

async def is_cancelled(stop):
    raise asyncio.CancelledError

async def returns_three(stop):
    return 3

async def leaves_a_thread(stop):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)
    await asyncio.sleep(0.1)

async def runs_uvloop(stop):
    return 0 if type(asyncio.get_running_loop()).__module__.startswith("uvloop") else 9

process._TEARDOWN_S = 0.5
process.run(globals()[sys.argv[1]])
"""


class Child:
    def __init__(self, main: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, main],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def says(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{line}\n"

    def ends(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.process.kill()
        child.process.communicate(timeout=PATIENCE_S)


def begin(children: list[Child], main: str) -> Child:
    child = Child(main)
    children.append(child)
    return child


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_for_the_end(children: list[Child], number: signal.Signals) -> None:
    child = begin(children, "stops")
    child.says("up")
    child.process.send_signal(number)
    child.says("drained")
    assert child.ends()[0] == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_at_once(children: list[Child], number: signal.Signals, status: int) -> None:
    child = begin(children, "drains_for_ever")
    child.says("up")
    child.process.send_signal(signal.SIGTERM)
    child.says("draining")
    child.process.send_signal(number)
    assert child.ends()[0] == status


def test_a_second_signal_ends_a_stuck_loop(children: list[Child]) -> None:
    child = begin(children, "is_stuck")
    child.says("up")
    child.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        child.process.wait(0.5)
    child.process.send_signal(signal.SIGTERM)
    assert child.ends()[0] == 143


@pytest.mark.parametrize(("main", "error"), [("crashes", "on purpose"), ("is_cancelled", "CancelledError")])
def test_a_crash_is_logged_and_no_success(children: list[Child], main: str, error: str) -> None:
    status, errors = begin(children, main).ends()
    assert status == 1
    (line,) = errors.splitlines()
    assert '"event":"crashed"' in line
    assert error in line


@pytest.mark.parametrize(("main", "status"), [("returns_three", 3), ("runs_uvloop", 0)])
def test_the_result_is_the_exit_status(children: list[Child], main: str, status: int) -> None:
    assert begin(children, main).ends() == (status, "")


def test_a_thread_that_hangs_does_not_keep_the_process(children: list[Child]) -> None:
    status, errors = begin(children, "leaves_a_thread").ends()
    assert status == 1
    assert "threads did not end" in errors
