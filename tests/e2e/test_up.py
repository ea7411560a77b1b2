"""`baton up` as a person uses it: real processes, a real NATS server, the fake engine instead of a model's."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from libs.service.bus import Bus
from libs.wire.errors import BusError
from services.cli.nats_server import find_binary
from services.cli.running import find

ROOT = Path(__file__).parents[2]
READY_S = 120.0  # a busy machine; on a quiet one it takes a few seconds
COMMAND = [sys.executable, "-m", "services.cli"]


def environment() -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("BATON_", "OTEL_"))}
    return env | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def wait_for(condition: Callable[[], object], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


class Up:
    """A `baton up` with a state directory of its own."""

    def __init__(self, state_dir: Path, *arguments: str) -> None:
        self.state_dir = state_dir
        self._said = state_dir.with_suffix(".out")
        command = [*COMMAND, "up", "--state-dir", str(state_dir), "--engine", "fake", *arguments]
        with self._said.open("w") as out:
            self.process = subprocess.Popen(
                command,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=state_dir.parent,
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    @property
    def address(self) -> str:
        match = re.search(r"ready at (https?://\S+)", self.said)
        assert match, self.said
        return match[1]

    def until_ready(self) -> None:
        def ready_or_gone() -> bool:
            return "ready at http" in self.said or self.process.poll() is not None

        wait_for(ready_or_gone, "ready", READY_S)
        assert self.process.poll() is None, self.said

    def pids(self) -> dict[str, int]:
        """Process ids by instance id, nats-1 included, of what runs now."""
        found = {}
        for pid in children(self.process.pid):
            env = dict(
                pair.split(b"=", 1)
                for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if b"=" in pair
            )
            found[env.get(b"BATON_INSTANCE_ID", b"nats-1").decode()] = pid
        return found

    def status(self) -> list[dict[str, Any]]:
        done = subprocess.run(
            [*COMMAND, "status", "--json", "--state-dir", str(self.state_dir)],
            env=environment(), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        found: list[dict[str, Any]] = json.loads(done.stdout or "[]")
        return found

    def get(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.address + path, timeout=10) as response:
                return int(response.status)
        except OSError as error:
            return int(getattr(error, "code", 0))


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def sockets(state_dir: Path) -> list[str]:
    return [path.name for path in state_dir.rglob("*") if path.is_socket()]


@contextmanager
def up(state_dir: Path, *arguments: str) -> Iterator[Up]:
    running = Up(state_dir, "--port", "0", *arguments)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGINT)
        try:
            running.process.wait(60)
        except subprocess.TimeoutExpired:
            running.process.kill()
            running.process.wait()


def chat(address: str) -> dict[str, Any]:
    body = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    with urllib.request.urlopen(address + "/v1/models", timeout=30) as response:
        body["model"] = json.load(response)["data"][0]["id"]
    request = urllib.request.Request(
        address + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def kill_and_wait_for_return(running: Up, name: str) -> None:
    before = running.pids()[name]
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: running.said.count(f"{name} is ready") == 2, f"{name} back", 60)
    assert running.pids()[name] != before


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


def test_start_answer_survive_and_stop(state_dir: Path) -> None:
    """One start serves for what does not end it: the curl line, status, a killed worker, a second `up`."""
    with up(state_dir, "--decode", "2") as running:
        running.until_ready()
        pasted = re.search(r"^ *(curl .*)$", running.said, re.MULTILINE)
        assert pasted, running.said
        done = subprocess.run(pasted[1], shell=True, capture_output=True, text=True, timeout=60, check=False)
        assert json.loads(done.stdout)["choices"][0]["finish_reason"] in ("stop", "length"), done
        names = {"nats-1", "cache-1", "prefill-1", "decode-1", "decode-2", "gateway-1"}
        assert set(running.pids()) == names
        assert {each["instance_id"] for each in running.status()} == names - {"nats-1"}

        second = Up(state_dir.with_name("other"), "--state-dir", str(state_dir), "--port", "0")
        assert second.process.wait(60) != 0
        assert f"process id {running.process.pid}" in second.said and "--state-dir" in second.said

        for victim in ("decode-1", "prefill-1", "gateway-1", "cache-1", "nats-1"):
            kill_and_wait_for_return(running, victim)
        wait_for(lambda: running.get("/ready") == 200, "ready again", 30)
        assert chat(running.address)["usage"]["completion_tokens"] > 0
        assert {each["instance_id"] for each in running.status()} == names - {"nats-1"}

        pids = running.pids()
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(60) == 0, running.said
    assert not [name for name, pid in pids.items() if alive(pid)]
    assert sockets(state_dir) == []
    order = [
        line.removeprefix("stopping ") for line in running.said.splitlines() if line.startswith("stopping")
    ]
    assert order == ["gateway-1", "prefill-1, decode-1, decode-2", "cache-1", "nats-1"]


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_an_up_that_is_ended_while_starting(state_dir: Path, stop: signal.Signals) -> None:
    with up(state_dir) as running:
        wait_for(lambda: len(running.pids()) == 5, "all processes started", READY_S)
        pids = running.pids()
        running.process.send_signal(stop)
        running.process.wait(60)
        wait_for(lambda: not any(alive(pid) for pid in pids.values()), f"gone: {pids}", 5)


def test_a_killed_up_takes_all_with_it_and_the_next_one_starts(state_dir: Path) -> None:
    with up(state_dir) as running:
        running.until_ready()
        pids = running.pids()
        running.process.kill()
        running.process.wait()
        wait_for(lambda: not any(alive(pid) for pid in pids.values()), f"gone: {pids}", 5)
    with up(state_dir) as again:
        again.until_ready()
        assert again.get("/ready") == 200
    assert again.process.returncode == 0
    assert sockets(state_dir) == []


def test_an_external_nats_server_is_used_and_left_alone(state_dir: Path, tmp_path: Path) -> None:
    binary = find_binary()
    assert binary is not None
    command = [str(binary), "--addr", "127.0.0.1", "--port", "-1", "--ports_file_dir", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            wait_for(lambda: list(tmp_path.glob("*.ports")), "ports file of nats-server", 30)
            url = json.loads(next(tmp_path.glob("*.ports")).read_text())["nats"][0]
            with up(state_dir, "--nats", url) as running:
                running.until_ready()
                ids = {each["instance_id"] for each in running.status()}
                assert ids == set(running.pids())
                assert all(name.endswith(f"-{running.process.pid}") for name in ids), (
                    "unique on a shared server"
                )
                assert chat(running.address)["usage"]["completion_tokens"] > 0
            assert running.process.returncode == 0
            assert server.poll() is None
        finally:
            server.kill()


def test_a_port_in_use_is_told_before_anything_starts(state_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with up(state_dir, "--port", str(port)) as running:
            assert running.process.wait(60) == 2
    assert f"port {port} on 127.0.0.1 is in use" in running.said and "--port" in running.said
    assert not (state_dir / "logs" / "gateway-1.log").exists()


def test_an_unknown_model_is_told_before_anything_starts(state_dir: Path) -> None:
    with up(state_dir, "--model", "no-such-model") as running:
        assert running.process.wait(60) == 2
    assert "no-such-model" in running.said
    assert running.said.count("\n") == 1


def test_a_nats_server_that_is_not_there_is_told(state_dir: Path) -> None:
    with up(state_dir, "--nats", "nats://127.0.0.1:1") as running:
        assert running.process.wait(60) == 1
    assert "nats://127.0.0.1:1" in running.said


def test_strangers_do_not_get_onto_the_bus(state_dir: Path) -> None:
    """What goes over NATS are prompts: other users of the machine reach its port, and must not read them."""
    with up(state_dir) as running:
        running.until_ready()
        found = find(state_dir)
        assert found is not None
        url = urlsplit(found.nats_url)
        assert url.password and len(url.password) >= 32

        async def connect(credentials: str) -> None:
            async with await Bus.connect(f"nats://{credentials}{url.hostname}:{url.port}", "x", timeout_s=2):
                pass

        asyncio.run(connect(f"{url.username}:{url.password}@"))
        for wrong in ("", f"{url.username}:guess@"):
            with pytest.raises(BusError, match="Authorization"):
                asyncio.run(connect(wrong))
        secret = url.password.encode()
        assert not any(secret in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in running.pids().values())
        kept = [path for path in state_dir.rglob("*") if path.is_file() and secret in path.read_bytes()]
        assert {path.name for path in kept} == {"nats.conf", "up.lock"}
        assert all(path.stat().st_mode & 0o077 == 0 for path in kept)
        assert secret.decode() not in running.said
