"""Two network namespaces and the only way between them: a router in this process, which delays, loses or drops packets.

    host A (10.77.1.1) ---- TUN ---- Router ---- TUN ---- host B (10.77.2.1)

As root, with `ip` of iproute2 and /dev/net/tun. The kernel's own `tc netem` is not needed, and often is not there.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

MTU: Final = 9000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Weather:
    """Of each direction. `loss` is the share of packets that vanish; 1.0 is a partition."""

    delay_s: float = 0.0
    loss: float = 0.0

    def __str__(self) -> str:
        if self.loss >= 1.0:
            return "partition"
        return f"{1e3 * self.delay_s:.0f} ms, {self.loss:.1%} lost"


@dataclass(frozen=True, slots=True)
class Namespace:
    """A host of its own, as far as its network goes."""

    name: str
    address: str

    @property
    def path(self) -> str:
        return f"/run/netns/{self.name}"


def why_not() -> str:
    """Why there can be no namespaces here; "" where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    made = subprocess.run(["ip", "netns", "add", "baton-probe"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", "baton-probe"], capture_output=True, check=False)
    return made.stderr.decode().strip()


def enter(namespace: Namespace) -> None:
    """From now on, the calling thread and what it starts are in that namespace. Raises OSError."""
    fd = os.open(namespace.path, os.O_RDONLY)
    try:
        if _libc.setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(fd)


class Router:
    """A context manager: makes the two hosts, and takes them away again. `weather` may change at any time."""

    def __init__(self, seed: int) -> None:
        self.a, self.b = (
            Namespace(f"baton-{side}-{os.getpid()}", f"10.77.{n}.1") for n, side in ((1, "a"), (2, "b"))
        )
        self.weather = Weather()
        self.num_packets = 0
        self._rng = random.Random(seed)
        self._fds: dict[int, int] = {}  # of one side, to the other
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)

    def __enter__(self) -> Self:
        try:
            one, other = self._host(self.a, self.b), self._host(self.b, self.a)
        except BaseException:
            self._remove()
            raise
        self._fds = {one: other, other: one}
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._remove()

    def _host(self, own: Namespace, other: Namespace) -> int:
        """Returns the router's end of its network."""
        _ip("netns", "add", own.name)
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        device = f"bt{own.address.split('.')[2]}-{os.getpid()}"[:15]
        try:
            fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
            _ip("link", "set", device, "netns", own.name)
            inside = ("-n", own.name)
            _ip(*inside, "address", "add", f"{own.address}/32", "dev", device)
            _ip(*inside, "link", "set", device, "up", "mtu", str(MTU))
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "route", "add", f"{other.address}/32", "dev", device)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _remove(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = {}
        for host in (self.a, self.b):
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)

    def _run(self) -> None:
        on_their_way: list[tuple[float, int, int, bytes]] = []  # due, number, where to, packet
        numbers = itertools.count()
        while not self._stop.is_set():
            wait_s = min(0.1, max(0.0, on_their_way[0][0] - time.monotonic())) if on_their_way else 0.1
            for source in select.select(list(self._fds), [], [], wait_s)[0]:
                with contextlib.suppress(BlockingIOError):
                    packet = os.read(source, MTU + 64)
                    self.num_packets += 1
                    weather = self.weather
                    if self._rng.random() >= weather.loss:
                        due_s = time.monotonic() + weather.delay_s
                        heapq.heappush(on_their_way, (due_s, next(numbers), self._fds[source], packet))
            while on_their_way and on_their_way[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(on_their_way)
                with contextlib.suppress(OSError):  # a full queue loses packets, as routers do
                    os.write(target, packet)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
