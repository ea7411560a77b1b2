"""Small questions to this machine: cores, ports, sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from libs.service.config import ConfigError

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")

_BACKLOG = 4096  # the kernel grants at most net.core.somaxconn


def cores() -> int:
    """CPUs that this process may use: its affinity, or less where a control group limits it."""
    allowed = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = _CPU_MAX.read_text().split()
        if quota != "max":
            return max(1, min(allowed, round(int(quota) / int(period))))
    return allowed


def free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. Raises ConfigError when it, or the host, cannot be had."""
    with _bound(host, port) as probe:
        return int(probe.getsockname()[1])


def open_port(host: str, port: int) -> socket.socket:
    """Listens: connections wait until a child process accepts them. Raises ConfigError as `free_port` does."""
    listener = _bound(host, port)
    listener.listen(_BACKLOG)
    return listener


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except OSError as error:
        made.close()
        reason = "is in use" if error.errno == 98 else f"cannot be used ({error.strerror or error})"
        raise ConfigError(f"port {port} on {host} {reason}; choose another with --port") from None
    return made


async def reachable(url: str, timeout_s: float) -> bool:
    """Whether something accepts connections at the first server of a NATS URL."""
    parts = urlsplit(url.split(",")[0])
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(parts.hostname or "127.0.0.1", parts.port or 4222)
            writer.close()
    except (OSError, TimeoutError, ValueError):
        return False
    return True


def id_suffix() -> str:
    """Makes ids of this machine's processes differ from those of any other on the same NATS server."""
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:32]
    return f"-{host}-{os.getpid()}"


def remove_dead_sockets(folder: Path) -> None:
    """Removes sockets that nobody listens on: what a killed process left behind."""
    for path in folder.glob("*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(0.5)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue


def remove_files(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        path.unlink(missing_ok=True)
