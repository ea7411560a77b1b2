"""What goes over a TCP link. All integers are big endian.

    holder                                            puller
      MAGIC, nonce (32)                          ---->
                <---- MAGIC, nonce (32), proof (32): HMAC(key, "pull", nonces)
      proof (32): HMAC(key, "hold", nonces, info), length (4), info (JSON of PoolInfo)  ---->

                <---- count (4), count times (first block (4), blocks (4))
      status (1), then if it is OK the bytes of these blocks, one after the other  ---->

Both sides prove that they know the key of the holder's present life, which travels with its PoolRef over NATS: whoever
may read offers there may pull. The challenge keeps the key itself off the wire, and a restarted holder refuses pullers
that mean its former life. The bytes are neither encrypted nor signed: this is for networks that are the operator's own.
HMAC: RFC 2104 with SHA-256.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from typing import Final

from libs.transfer.interface import TransferError

MAGIC: Final = b"BATONKV\x01"  # the last byte is the version
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
KEY_BYTES: Final = 32
MAX_RUNS: Final = 1 << 16
MAX_INFO_BYTES: Final = 1 << 16
OK: Final = 0
NO_SUCH_BLOCK: Final = 1
COUNT: Final = struct.Struct("!I")
RUN: Final = struct.Struct("!II")


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def prove(key: bytes, role: bytes, *parts: bytes) -> bytes:
    """Lengths go in, too: parts cannot be cut in another way."""
    message = b"".join(len(part).to_bytes(8) + part for part in (role, *parts))
    return hmac.digest(key, message, "sha256")


def send(sock: socket.socket, data: bytes, deadline_s: float) -> None:
    """Raises OSError (TimeoutError among them)."""
    sock.settimeout(left(deadline_s))
    sock.sendall(data)


def receive(sock: socket.socket, size: int, deadline_s: float) -> bytes:
    """Exactly `size` bytes. Raises OSError, EOFError."""
    buffer = bytearray(size)
    receive_into(sock, memoryview(buffer), deadline_s)
    return bytes(buffer)


def receive_into(sock: socket.socket, target: memoryview, deadline_s: float) -> None:
    """Fills `target`. Raises OSError, EOFError."""
    while target:
        sock.settimeout(left(deadline_s))
        count = sock.recv_into(target)
        if not count:
            raise EOFError("the other side closed the connection")
        target = target[count:]


def left(deadline_s: float) -> float:
    """Seconds until `deadline_s`. Raises TimeoutError when it has passed."""
    seconds = deadline_s - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


def check_magic(found: bytes) -> None:
    """Raises TransferError."""
    if found[:-1] != MAGIC[:-1]:
        raise TransferError("the other side does not speak Baton's transfer protocol")
    if found != MAGIC:
        raise TransferError(f"the other side speaks version {found[-1]} of the protocol, not {MAGIC[-1]}")
