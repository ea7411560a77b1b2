"""The holder's side of an authenticated TCP connection: one thread for each puller."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from libs.service.logs import get_logger
from libs.transfer import tcp_frames as frames
from libs.transfer.interface import TransferError

HANDSHAKE_S: Final = 5.0
MAX_CONNECTIONS: Final = 128
JOIN_S: Final = 5.0
log = get_logger()


class TcpServer:
    """Serves pullers that know `key`. Strangers and broken pullers cost their own connection.

    `card` is what a puller is told once both have proved that they know the key; `answer` then serves one request of
    its, on the connection's own thread, and may raise OSError, EOFError or TransferError to end it.

    Listens from the start, so that the endpoint is known; answers once started. Raises OSError where it cannot listen.
    """

    def __init__(
        self,
        scheme: str,
        card: bytes,
        key: bytes,
        host: str,
        port: int,
        answer: Callable[[socket.socket], None],
    ) -> None:
        self._scheme = scheme
        self._card = card
        self._key = key
        self._answer = answer
        listener = socket.create_server((host, port), family=_family(host), backlog=MAX_CONNECTIONS)
        self._listener: socket.socket | None = listener
        self._address = (host, listener.getsockname()[1])
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._acceptor: threading.Thread | None = None

    @property
    def endpoint(self) -> str:
        host, port = self._address
        return f"{self._scheme}://[{host}]:{port}" if ":" in host else f"{self._scheme}://{host}:{port}"

    async def start(self) -> None:
        if self._listener is None or self._acceptor is not None:
            raise RuntimeError("started twice, or closed")
        self._acceptor = threading.Thread(
            target=self._accept, args=(self._listener,), name="kv-accept", daemon=True
        )
        self._acceptor.start()

    async def close(self) -> None:
        if self._listener is None:
            return
        listener, self._listener = self._listener, None
        await asyncio.to_thread(self._close, listener)

    def _close(self, listener: socket.socket) -> None:
        _cut(listener)
        if self._acceptor is not None:
            self._acceptor.join(JOIN_S)
        with self._lock:
            threads = list(self._connections.items())
        for connection, _ in threads:
            _cut(connection)
        for _, thread in threads:
            thread.join(JOIN_S)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except ConnectionAbortedError:  # gone before it was accepted
                continue
            except OSError:
                if self._listener is None:
                    return
                time.sleep(0.1)  # no descriptors left: later, perhaps
                continue
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(connection,), name="kv-serve", daemon=True)
        with self._lock:
            is_full = len(self._connections) >= MAX_CONNECTIONS
            if not is_full:
                self._connections[connection] = thread
        if is_full:
            log.warning("too many pullers: one is turned away", limit=MAX_CONNECTIONS)
            connection.close()
            return
        thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._greet(connection)
            while True:
                self._answer(connection)
        except (OSError, EOFError, TransferError) as error:
            log.debug("a puller's connection ended", reason=str(error))
        finally:
            with self._lock:
                del self._connections[connection]
            connection.close()

    def _greet(self, connection: socket.socket) -> None:
        """Raises TransferError for somebody who does not know the key: no byte of the pool, not even its size."""
        deadline_s = time.monotonic() + HANDSHAKE_S
        nonce = secrets.token_bytes(frames.NONCE_BYTES)
        frames.send(connection, frames.MAGIC + nonce, deadline_s)
        frames.check_magic(frames.receive(connection, len(frames.MAGIC), deadline_s))
        theirs = frames.receive(connection, frames.NONCE_BYTES, deadline_s)
        proof = frames.receive(connection, frames.PROOF_BYTES, deadline_s)
        if not hmac.compare_digest(proof, frames.prove(self._key, b"pull", nonce, theirs)):
            raise TransferError("the puller does not know the key")
        answer = frames.prove(self._key, b"hold", nonce, theirs, self._card)
        frames.send(connection, answer + frames.COUNT.pack(len(self._card)) + self._card, deadline_s)


def _family(host: str) -> socket.AddressFamily:
    with contextlib.suppress(ValueError):
        return socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    families: Iterator[socket.AddressFamily] = (each[0] for each in socket.getaddrinfo(host, None))
    return next(families)


def _cut(sock: socket.socket) -> None:
    """Wakes whoever waits in it. The one who reads it closes it; a listener is closed here."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    if sock.fileno() >= 0 and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.close()
