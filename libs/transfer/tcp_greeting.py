"""The puller's side of an authenticated TCP connection."""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from urllib.parse import urlsplit

from libs.transfer import tcp_frames as frames
from libs.transfer.interface import TransferError


def greet(endpoint: str, key: bytes, timeout_s: float) -> tuple[socket.socket, bytes]:
    """Connects, proves to each other who is who; returns the connection and what the holder says of itself.

    Blocks up to `timeout_s`. Raises TransferError.
    """
    deadline_s = time.monotonic() + timeout_s
    sock: socket.socket | None = None
    try:
        url = urlsplit(endpoint)
        sock = socket.create_connection((url.hostname, url.port), timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock, _card(sock, key, deadline_s)
    except (OSError, EOFError, ValueError, TransferError) as error:
        if sock is not None:
            sock.close()
        raise TransferError(f"cannot pull from {endpoint}: {error}") from error


def _card(sock: socket.socket, key: bytes, deadline_s: float) -> bytes:
    frames.check_magic(frames.receive(sock, len(frames.MAGIC), deadline_s))
    theirs = frames.receive(sock, frames.NONCE_BYTES, deadline_s)
    nonce = secrets.token_bytes(frames.NONCE_BYTES)
    frames.send(sock, frames.MAGIC + nonce + frames.prove(key, b"pull", theirs, nonce), deadline_s)
    try:
        proof = frames.receive(sock, frames.PROOF_BYTES, deadline_s)
    except (EOFError, ConnectionError):
        raise TransferError("it refuses the key: it has restarted, or serves too many") from None
    (size,) = frames.COUNT.unpack(frames.receive(sock, frames.COUNT.size, deadline_s))
    if size > frames.MAX_INFO_BYTES:
        raise TransferError(f"a description of {size} bytes")
    card = frames.receive(sock, size, deadline_s)
    if not hmac.compare_digest(proof, frames.prove(key, b"hold", theirs, nonce, card)):
        raise TransferError("it does not know its own key")
    return card
