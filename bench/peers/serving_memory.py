"""Resident memory of a prefill and a decode worker that serve together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.commands import output_of
from libs.bench.memory import Resident, resident
from libs.wire.errors import BatonError

_START_TIMEOUT_S, _STOP_TIMEOUT_S, _STATUS_TIMEOUT_S, _ANSWER_TIMEOUT_S = 180.0, 60.0, 30.0, 300.0
_PROMPT = "word " * 1000  # long enough that prefill hands it over
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """Bytes. `workers` are prefill and decode; each has a pool of `kv_pool_bytes`."""

    workers: tuple[Resident, ...]
    weight_bytes: int
    kv_pool_bytes: int

    @property
    def resident_bytes(self) -> int:
        """With full pools: what was never written of a pool is not resident yet, and it will be."""
        pools = len(self.workers) * self.kv_pool_bytes
        return sum(worker.beside_kv_bytes for worker in self.workers) + pools

    @property
    def ratio(self) -> float:
        return self.resident_bytes / (self.weight_bytes + len(self.workers) * self.kv_pool_bytes)


def measure(model: Path, threads: int, weight_bytes: int, kv_cache_mib: int) -> ServingMemory:
    """Starts `baton up`, lets it answer one long prompt, and reads its workers' memory. Raises BatonError."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        options = ("--model", str(model), "--threads", str(threads), "--kv-cache-mib", str(kv_cache_mib))
        with _serving(Path(folder), options) as statuses:
            gateway = next(status["address"] for status in statuses if status["service"] == "gateway")
            _complete(gateway)
            pids = [status["pid"] for status in statuses if status["service"] in ("prefill", "decode")]
            return ServingMemory(tuple(resident(pid) for pid in pids), weight_bytes, kv_cache_mib * _MIB)


@contextmanager
def _serving(folder: Path, options: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """`baton up` in a state directory of its own; yields what its processes say of themselves."""
    command = [
        sys.executable,
        "-m",
        "services.cli",
        "up",
        "--port",
        "0",
        "--state-dir",
        str(folder),
        *options,
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    log = folder / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            yield _wait_until_ready(process, folder, log)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], folder: Path, log: Path) -> list[dict[str, Any]]:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        if "Baton is ready at" in log.read_text(encoding="utf-8", errors="replace"):
            command = [sys.executable, "-m", "services.cli", "status", "--json", "--state-dir", folder]
            statuses: list[dict[str, Any]] = json.loads(output_of(command, timeout_s=_STATUS_TIMEOUT_S))
            return statuses
        time.sleep(0.2)
    raise BatonError(f"`baton up` did not get ready: {log.read_text(errors='replace')[-500:]}")


def _complete(address: str) -> None:
    """One answer, so that workers have allocated what they allocate while they work."""
    model = json.loads(_http(f"{address}/v1/models", None))["data"][0]["id"]
    body = {"model": model, "prompt": _PROMPT, "max_tokens": 32, "temperature": 0}
    _http(f"{address}/v1/completions", json.dumps(body).encode())


def _http(url: str, body: bytes | None) -> bytes:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
    try:
        with opener.open(request, timeout=_ANSWER_TIMEOUT_S) as response:
            return bytes(response.read())
    except OSError as error:
        raise BatonError(f"{url}: {error}") from error
