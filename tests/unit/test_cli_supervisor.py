"""Supervised processes: restarts, giving up, order of stopping, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from services.cli.child import ProcessSpec, RestartPolicy
from services.cli.supervisor import Supervisor

QUICK = RestartPolicy(first_delay_s=0.01, max_delay_s=0.04, stable_s=60, max_crashes=5, window_s=60)
SLEEP = "import time; print('up', flush=True); time.sleep(60)"
POLITE = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(0)))\n"
    + SLEEP
)
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
DEADLINE_S = 20.0


class Bench:
    """A supervisor, and what it said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.supervisor = Supervisor(QUICK, self.said.append)

    def spec(self, name: str, code: str, grace_s: float = 10.0) -> ProcessSpec:
        argv = (sys.executable, "-c", code)
        return ProcessSpec(name, argv, dict(os.environ), self.folder / f"{name}.log", grace_s)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110  what other processes do sends no event
                await asyncio.sleep(0.01)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.supervisor.kill()
    await bench.supervisor.stop([], lambda _: None)


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # gone before the open, or between open and read
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


async def test_a_killed_process_comes_back_and_must_report_again(bench: Bench) -> None:
    child = bench.supervisor.start(bench.spec("a", SLEEP))
    await bench.until(lambda: "up" in bench.log("a"))
    child.mark_ready()
    first = child.pid
    assert first is not None and not bench.supervisor.not_ready
    os.kill(first, signal.SIGKILL)
    await bench.until(lambda: bench.log("a").count("up") == 2)
    assert child.pid not in (None, first)
    assert [each.name for each in bench.supervisor.not_ready] == ["a"]
    log = bench.folder / "a.log"
    assert bench.said == [f"a was ended by SIGKILL; starting it again in 0.01 s (log: {log})"]


async def test_waits_double_up_to_a_limit_and_a_process_that_was_ready_is_never_given_up(
    bench: Bench,
) -> None:
    child = bench.supervisor.start(bench.spec("a", "import sys; sys.exit(3)"))
    child.mark_ready()
    await bench.until(lambda: len(bench.said) >= 6)
    waits = [line.split(" again in ")[1].split()[0] for line in bench.said[:5]]
    assert waits == ["0.01", "0.02", "0.04", "0.04", "0.04"]
    assert not bench.supervisor.failure.done()


async def test_a_process_that_never_comes_up_is_given_up_with_its_last_words(bench: Bench) -> None:
    bench.supervisor.start(bench.spec("a", "print('no such model'); raise SystemExit(1)"))
    failed = await asyncio.wait_for(bench.supervisor.failure, DEADLINE_S)
    assert str(failed) == "a exited with status 1 5 times before it was ready"
    assert failed.log_tail == ["no such model"] * 5
    assert len(bench.said) == 4


async def test_unusable_settings_are_not_tried_again(bench: Bench) -> None:
    bench.supervisor.start(bench.spec("a", "print('bad port'); raise SystemExit(2)"))
    failed = await asyncio.wait_for(bench.supervisor.failure, DEADLINE_S)
    assert (failed.name, failed.log_tail, bench.said) == ("a", ["bad port"], [])


async def test_a_program_that_does_not_exist_fails_at_once(bench: Bench) -> None:
    spec = ProcessSpec("a", ("/nonexistent/program",), {}, bench.folder / "a.log", 1.0)
    bench.supervisor.start(spec)
    failed = await asyncio.wait_for(bench.supervisor.failure, DEADLINE_S)
    assert "cannot be started" in str(failed)


async def test_stages_stop_one_after_the_other(bench: Bench) -> None:
    children = [bench.supervisor.start(bench.spec(name, POLITE)) for name in ("gateway", "decode", "nats")]
    await bench.until(lambda: all("up" in bench.log(child.name) for child in children))
    pids = {child.name: child.pid or 0 for child in children}
    seen: list[tuple[str, list[bool]]] = []
    await bench.supervisor.stop(
        [["gateway"], ["decode", "unknown"], ["nats"]],
        lambda names: seen.append((names, [alive(pid) for pid in pids.values()])),
    )
    assert seen == [
        ("gateway", [True, True, True]),
        ("decode", [False, True, True]),
        ("nats", [False, False, True]),
    ]
    assert all("bye" in bench.log(name) for name in pids)
    assert not any(alive(pid) for pid in pids.values())


async def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(bench: Bench) -> None:
    child = bench.supervisor.start(bench.spec("a", STUBBORN, grace_s=0.2))
    await bench.until(lambda: "up" in bench.log("a"))
    pid = child.pid or 0
    await bench.supervisor.stop([["a"]], lambda _: None)
    assert not alive(pid)
    assert bench.said == ["a did not stop within 0.2 s: killed"]


async def test_a_stop_that_is_broken_off_leaves_nothing(bench: Bench) -> None:
    children = [bench.supervisor.start(bench.spec(name, STUBBORN, grace_s=60)) for name in ("a", "b")]
    await bench.until(lambda: all("up" in bench.log(child.name) for child in children))
    pids = [child.pid or 0 for child in children]
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(bench.supervisor.stop([["a"], ["b"]], lambda _: None), 0.1)
    assert not any(alive(pid) for pid in pids)


async def test_killing_reaches_what_the_process_started(bench: Bench) -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    bench.supervisor.start(bench.spec("a", code))
    await bench.until(lambda: bench.log("a").endswith("\n"))
    grandchild = int(bench.log("a"))
    bench.supervisor.kill()
    await bench.until(lambda: not alive(grandchild))


async def test_stop_while_waiting_for_a_restart_does_not_start_again(bench: Bench) -> None:
    slow = RestartPolicy(first_delay_s=60)
    supervisor = Supervisor(slow, bench.said.append)
    supervisor.start(bench.spec("a", "print('up'); raise SystemExit(1)"))
    await bench.until(lambda: bench.said)
    started = time.monotonic()
    await supervisor.stop([["a"]], lambda _: None)
    assert time.monotonic() - started < 30
    assert bench.log("a").count("up") == 1


ORPHAN = """
import asyncio, sys
from pathlib import Path
from services.cli.child import ProcessSpec, RestartPolicy
from services.cli.supervisor import Supervisor

async def main():
    supervisor = Supervisor(RestartPolicy(), print)
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    supervisor.start(ProcessSpec("a", (sys.executable, "-c", code), {}, Path(sys.argv[1]), 1.0))
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_children_die_with_a_supervisor_that_is_killed(bench: Bench) -> None:
    log = bench.folder / "orphan.log"
    root = str(Path(__file__).parents[2])
    supervisor = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", ORPHAN, str(log)], env=os.environ | {"PYTHONPATH": root}
    )
    try:
        await bench.until(lambda: log.exists() and log.read_text().endswith("\n"))
        child = int(log.read_text())
        assert alive(child)
    finally:
        supervisor.kill()
        supervisor.wait()
    await bench.until(lambda: not alive(child))
