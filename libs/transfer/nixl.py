"""Blocks by NIXL: RDMA where the network has it, between processes of one host through UCX's shared memory.

    puller -- TCP, authenticated --> holder     the holder's card: agent, address of its pool
    puller == READ of UCX =========> pool       without the holder's CPU, where the hardware can

A network that cannot read by itself needs the holder's help. So a puller says when it begins and ends, over the
connection that it was greeted on, and meanwhile a thread of the holder makes progress.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from libs.engine.kv.pool import KvPool
from libs.transfer import tcp_frames as frames
from libs.transfer.interface import Copy, Place, PoolInfo, TransferError, Transport
from libs.transfer.nixl_agent import Agent, Agents, missing
from libs.transfer.runs import Run, runs
from libs.transfer.tcp_greeting import greet
from libs.transfer.tcp_server import TcpServer

SCHEME: Final = "nixl"
BEGIN: Final = b"B"
END: Final = b"E"
IDLE_S: Final = 600.0  # a puller closes links that it has not used for far less
PULL_S: Final = 120.0  # the longest that a holder helps one pull; pullers give up sooner
PROGRESS_S: Final = 0.0002  # between two looks
_agents: Final = Agents()


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What a holder says of itself. `metadata`: of its agent, as NIXL makes it; `address`: of the pool's first byte."""

    info: PoolInfo
    metadata: bytes
    address: int


class NixlExporter:
    """Implements Exporter. Raises OSError where it cannot listen, or NIXL does not work."""

    def __init__(self, pool: KvPool, info: PoolInfo, key: bytes, place: Place) -> None:
        if reason := missing():
            raise OSError(reason)
        self._pool: KvPool | None = pool
        try:
            self._agent = _agents.take(pool)
        except TransferError as error:
            raise OSError(error.message) from error
        card = Card(info=info, metadata=self._agent.metadata, address=self._agent.address)
        try:
            self._server = TcpServer(SCHEME, msgspec.json.encode(card), key, place.host, 0, self._answer)
        except OSError:
            _agents.give_back(pool)
            raise

    @property
    def endpoint(self) -> str:
        return self._server.endpoint

    async def start(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        await self._server.close()
        if self._pool is not None:
            _agents.give_back(self._pool)
            self._pool = None

    def _answer(self, connection: socket.socket) -> None:
        """Helps one pull, from its BEGIN to its END. Raises TransferError for a puller that never ends."""
        _expect(connection, BEGIN, time.monotonic() + IDLE_S)
        deadline_s = time.monotonic() + PULL_S
        connection.settimeout(PULL_S)
        while not select.select([connection], [], [], PROGRESS_S)[0]:
            self._agent.progress()
            if time.monotonic() > deadline_s:
                raise TransferError("a pull without an end")
        _expect(connection, END, deadline_s)


class NixlLink:
    """Implements Link: its pool's agent, a peer's, and the connection on which the peer is asked to help."""

    def __init__(self, sock: socket.socket, card: Card, own: KvPool) -> None:
        """Raises TransferError."""
        self.info = card.info
        self._sock = sock
        self._own = own
        self._theirs = card.address
        self._is_open = True
        self._is_aborted = False
        self._agent: Agent = _agents.take(own)
        try:
            self._peer = self._agent.add(card.metadata)
        except TransferError:
            _agents.give_back(own)
            raise

    @property
    def is_open(self) -> bool:
        return self._is_open and not self._is_aborted

    def pull(self, copies: Sequence[Copy], deadline_s: float) -> None:
        """See `Link.pull`. After an error the link is closed, and with it the way on which more could come."""
        if not self.is_open:
            raise TransferError("the link is closed")
        wanted = runs(copies)
        for theirs, _, count in wanted:
            if theirs < 0 or theirs + count > self.info.num_blocks:
                raise TransferError(f"{self.info.worker_id} has no block {theirs + count - 1}")
        if not wanted:
            return
        try:
            frames.send(self._sock, BEGIN, deadline_s)
            self._read(wanted, deadline_s)
            frames.send(self._sock, END, deadline_s)
        except (OSError, EOFError, TransferError) as error:
            self.close()
            raise TransferError(f"pulling from {self.info.worker_id}: {error}") from error

    def _read(self, wanted: Sequence[Run], deadline_s: float) -> None:
        size, ours = self.info.num_bytes // self.info.num_blocks, self._agent.address
        handle = self._agent.read(
            self._peer,
            [(self._theirs + theirs * size, count * size) for theirs, _, count in wanted],
            [(ours + mine * size, count * size) for _, mine, count in wanted],
        )
        try:
            while not self._agent.is_done(handle):
                frames.left(deadline_s)
                if self._is_aborted:
                    raise TransferError("aborted")
                if select.select([self._sock], [], [], PROGRESS_S)[0]:  # a holder says nothing while it lives
                    raise EOFError("the other side closed the connection")
        finally:
            self._agent.release(handle)

    def abort(self) -> None:
        self._is_aborted = True

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._sock.close()
        try:
            self._agent.remove(self._peer)
        finally:
            _agents.give_back(self._own)


def connect(endpoint: str, key: bytes, own: KvPool, timeout_s: float) -> NixlLink:
    """Connects and proves to each other who is who. Blocks up to `timeout_s`. Raises TransferError."""
    sock, answer = greet(endpoint, key, timeout_s)
    try:
        card = msgspec.json.decode(answer, type=Card)
        card.info.check(own)
        return NixlLink(sock, card, own)
    except (ValueError, TransferError) as error:
        sock.close()
        raise TransferError(f"cannot pull from {endpoint}: {error}") from error


def export(pool: KvPool, info: PoolInfo, key: bytes, place: Place) -> NixlExporter:
    return NixlExporter(pool, info, key, place)


def unreachable(endpoint: str) -> str:
    return missing()


TRANSPORT = Transport(SCHEME, export, connect, unreachable)


def _expect(connection: socket.socket, word: bytes, deadline_s: float) -> None:
    found = frames.receive(connection, 1, deadline_s)
    if found != word:
        raise TransferError(f"{found!r} where {word!r} was to come")
