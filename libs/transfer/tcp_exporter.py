"""The holder's side of TCP: blocks straight from the pool's memory."""

from __future__ import annotations

import socket
import time
from dataclasses import asdict
from typing import Final

import msgspec

from libs.engine.kv.pool import KvPool
from libs.transfer import tcp_frames as frames
from libs.transfer.interface import PoolInfo, TransferError
from libs.transfer.tcp_server import TcpServer

IDLE_S: Final = 600.0  # a puller closes links that it has not used for far less
STALL_S: Final = 30.0  # for a puller that takes nothing


class TcpExporter:
    """Implements Exporter. Raises OSError where it cannot listen."""

    def __init__(self, pool: KvPool, info: PoolInfo, key: bytes, host: str, port: int) -> None:
        self._pool = pool
        self._info = info
        self._server = TcpServer("tcp", msgspec.json.encode(asdict(info)), key, host, port, self._answer)

    @property
    def endpoint(self) -> str:
        return self._server.endpoint

    async def start(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        await self._server.close()

    def _answer(self, connection: socket.socket) -> None:
        """One request. Raises TransferError for one that cannot be meant."""
        deadline_s = time.monotonic() + IDLE_S
        (count,) = frames.COUNT.unpack(frames.receive(connection, frames.COUNT.size, deadline_s))
        if count > frames.MAX_RUNS:
            raise TransferError(f"{count} runs in one request")
        deadline_s = time.monotonic() + STALL_S
        wanted = frames.receive(connection, count * frames.RUN.size, deadline_s)
        runs = list(frames.RUN.iter_unpack(wanted))
        if any(first + blocks > self._info.num_blocks for first, blocks in runs):
            frames.send(connection, bytes([frames.NO_SUCH_BLOCK]), deadline_s)
            return
        frames.send(connection, bytes([frames.OK]), deadline_s)
        for first, blocks in runs:
            self._send(connection, self._pool.blocks(first, blocks))

    def _send(self, connection: socket.socket, data: memoryview) -> None:
        """Each part has its own time: a long transfer may take long, a stalled one may not."""
        connection.settimeout(STALL_S)
        while data:
            data = data[connection.send(data) :]
