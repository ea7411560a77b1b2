"""A whole Baton in its own processes, started with the command that users type."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.native import CACHE_DIR

ROOT = Path(__file__).parents[2]
READY = re.compile(r"ready at (http://\S+)")


class Baton:
    """`baton up` with `arguments`, its own state directory and a free port. Ready when constructed."""

    def __init__(self, state_dir: Path, *arguments: str, start_timeout_s: float = 120, **env: str) -> None:
        self.state_dir = state_dir
        clean = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        self.env = {**clean, "PYTHONPATH": str(ROOT), "BATON_CACHE_DIR": str(CACHE_DIR), **env}
        command = [sys.executable, "-m", "services.cli", "up", "--port", "0", "--state-dir", str(state_dir)]
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.env,
        )
        self.output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._await_ready(start_timeout_s)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)

    def _await_ready(self, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if found := READY.search("".join(self.output)):
                return found.group(1)
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.stop()
        raise AssertionError(f"baton up did not become ready:\n{''.join(self.output)}")

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs another `baton` command on the same state directory."""
        env = {**self.env, "BATON_STATE_DIR": str(self.state_dir)}
        command = [sys.executable, "-m", "services.cli", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)

    def json(self, *arguments: str) -> Any:
        done = self.command(*arguments, "--json")
        assert done.returncode == 0, done.stderr + done.stdout
        return json.loads(done.stdout)

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 300) -> tuple[int, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def get(self, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def complete(self, prompt: list[int] | str, **options: Any) -> dict[str, Any]:
        """The answer to /v1/completions, greedy unless `options` say otherwise."""
        body = {"model": self.model(), "prompt": prompt, "temperature": 0, **options}
        status, answer = self.post("/v1/completions", body)
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    def model(self) -> str:
        status, body = self.get("/v1/models")
        assert status == 200
        return str(json.loads(body)["data"][0]["id"])

    def loads(self) -> dict[str, dict[str, int]]:
        """Load of each worker, by its id."""
        return {each["instance_id"]: each["load"] for each in self.json("status") if each["load"]}

    def until_idle(self, timeout_s: float) -> None:
        """Waits until no worker has a request and every block is free or cached. Fails after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            loads = self.loads()
            busy = [
                name
                for name, load in loads.items()
                if load["running"] or load["waiting"]
                or load["blocks_free"] + load["blocks_cached"] != load["blocks_total"]
            ]  # fmt: skip
            if loads and not busy:
                return
            assert time.monotonic() < deadline, f"not idle after {timeout_s} s: {loads}"
            time.sleep(0.1)

    def stop(self) -> int:
        """Ctrl-C, and waits for the end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
                raise
        return self.process.returncode
