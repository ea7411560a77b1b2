"""A real `baton up` for programs that measure it from outside, and one stream of tokens as a client sees it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.commands import output_of
from libs.wire.errors import BatonError

_TOKEN_IDS = (1000, 20000)  # ordinary tokens of any vocabulary; below are control tokens
_START_S, _COMMAND_S, _ANSWER_S, _POLL_S = 120.0, 120.0, 120.0, 0.1


@dataclass(frozen=True, slots=True)
class Up:
    """A running `baton up`."""

    folder: Path
    url: str
    model: str

    def first_token_ms(self, prompt: list[int]) -> tuple[float, dict[str, Any]]:
        """Until the first text of a stream, at the client; and where the prompt's tokens came from."""
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        usage: dict[str, Any] = {}
        begin, first_s = time.perf_counter(), 0.0
        with _opener().open(request, timeout=_ANSWER_S) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                first_s = first_s or time.perf_counter() - begin
                usage = json.loads(line[6:]).get("usage") or usage
        return 1e3 * first_s, usage["prompt_tokens_details"]

    def status(self) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "services.cli", "status", "--json", "--state-dir", self.folder]
        found: list[dict[str, Any]] = json.loads(output_of(command, timeout_s=30))
        return found

    def until(self, condition: Callable[[list[dict[str, Any]]], bool], what: str) -> None:
        deadline = time.monotonic() + _COMMAND_S
        while not condition(self.status()):
            if time.monotonic() > deadline:
                raise BatonError(f"{what} did not come about within {_COMMAND_S:g} s")
            time.sleep(_POLL_S)


@contextmanager
def baton_up(folder: Path, threads: int, *options: object) -> Iterator[Up]:
    """Killed at the end, every process of it, with SIGKILL."""
    command = [
        sys.executable, "-m", "services.cli", "up", "--port", "0", "--state-dir", folder, "--threads", threads,
        *options,
    ]  # fmt: skip
    log = folder / "bench-up.log"
    folder.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        pids: list[int] = [process.pid]
        try:
            url = _ready_url(process, log)
            model = json.loads(_opener().open(f"{url}/v1/models", timeout=10).read())["data"][0]["id"]
            up = Up(folder, url, model)
            pids += [status["pid"] for status in up.status()]
            yield up
            pids += [status["pid"] for status in up.status()]
        finally:
            for pid in pids:
                kill(pid)
            process.wait()


def random_tokens(rng: random.Random, count: int) -> list[int]:
    """A prompt that nobody has asked before."""
    return [rng.randrange(*_TOKEN_IDS) for _ in range(count)]


def _ready_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        _, found, rest = log.read_text(errors="replace").partition("ready at ")
        if found and "\n" in rest:
            return rest.split()[0]
        time.sleep(_POLL_S)
    raise BatonError(f"`baton up` did not get ready: {log.read_text(errors='replace')[-500:]}")


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))
