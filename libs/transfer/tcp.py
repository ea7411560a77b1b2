"""Blocks over TCP, between hosts that have nothing faster in common. `tcp_frames.py` has the protocol.

A pull is one request; the answer is read straight into the pool. A puller that must stop in the middle closes the
connection: whatever else would have come has nowhere to go.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Final

import msgspec

from libs.engine.kv.pool import KvPool
from libs.transfer import tcp_frames as frames
from libs.transfer.interface import Copy, Place, PoolInfo, TransferError, Transport
from libs.transfer.runs import Run, runs
from libs.transfer.tcp_exporter import TcpExporter
from libs.transfer.tcp_greeting import greet

SCHEME: Final = "tcp"


class TcpLink:
    """An authenticated connection to a holder."""

    def __init__(self, sock: socket.socket, info: PoolInfo, own: KvPool) -> None:
        self.info = info
        self._sock = sock
        self._own = own
        self._is_open = True

    @property
    def is_open(self) -> bool:
        return self._is_open

    def pull(self, copies: Sequence[Copy], deadline_s: float) -> None:
        """See `Link.pull`. After an error the link is closed."""
        if not self._is_open:
            raise TransferError("the link is closed")
        wanted = runs(copies)
        try:
            for start in range(0, len(wanted), frames.MAX_RUNS):
                self._pull(wanted[start : start + frames.MAX_RUNS], deadline_s)
        except (OSError, EOFError) as error:
            self.close()
            raise TransferError(f"pulling from {self.info.worker_id}: {error}") from error

    def _pull(self, wanted: Sequence[Run], deadline_s: float) -> None:
        for theirs, _, count in wanted:
            if theirs < 0 or theirs + count > self.info.num_blocks:
                raise TransferError(f"{self.info.worker_id} has no block {theirs + count - 1}")
        request = b"".join(frames.RUN.pack(theirs, count) for theirs, _, count in wanted)
        frames.send(self._sock, frames.COUNT.pack(len(wanted)) + request, deadline_s)
        (status,) = frames.receive(self._sock, 1, deadline_s)
        if status != frames.OK:
            raise TransferError(f"{self.info.worker_id} has no such blocks")
        for _, ours, count in wanted:
            frames.receive_into(self._sock, self._own.blocks(ours, count), deadline_s)

    def abort(self) -> None:
        """The link is of no use afterwards: bytes that nobody wants any more are on their way."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._is_open = False

    def close(self) -> None:
        self._is_open = False
        self._sock.close()


def connect(endpoint: str, key: bytes, own: KvPool, timeout_s: float) -> TcpLink:
    """Connects and proves to each other who is who. Blocks up to `timeout_s`. Raises TransferError."""
    sock, card = greet(endpoint, key, timeout_s)
    try:
        info = msgspec.json.decode(card, type=PoolInfo)
        info.check(own)
    except (ValueError, TransferError) as error:
        sock.close()
        raise TransferError(f"cannot pull from {endpoint}: {error}") from error
    return TcpLink(sock, info, own)


def export(pool: KvPool, info: PoolInfo, key: bytes, place: Place) -> TcpExporter:
    return TcpExporter(pool, info, key, place.host, place.port)


def unreachable(endpoint: str) -> str:
    """Trying tells."""
    return ""


TRANSPORT = Transport(SCHEME, export, connect, unreachable)
