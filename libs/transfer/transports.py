"""The transports that there are, the fastest first, and which of them a worker may use."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit

from libs.transfer import nixl, shm, tcp
from libs.transfer.interface import Transport
from libs.transfer.names import parse

TRANSPORTS: Final = {"shm": shm.TRANSPORT, "nixl": nixl.TRANSPORT, "tcp": tcp.TRANSPORT}


def allowed(text: str) -> tuple[Transport, ...]:
    """Those that a list such as "shm,tcp" names, in its order. Raises ValueError for a name that does not exist."""
    return tuple(TRANSPORTS[name] for name in parse(text))


def address_towards(url: str) -> str:
    """This machine's address on the way to the first host of `url` (nats://host:port,...): peers are likely there.

    127.0.0.1 where that host is this one, or cannot be resolved. Sends nothing.
    """
    parts = urlsplit(url.split(",")[0].strip())
    host, port = parts.hostname or "127.0.0.1", parts.port or 4222
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])
            return str(ipaddress.ip_address(probe.getsockname()[0].partition("%")[0]))
    except (OSError, ValueError):
        return "127.0.0.1"
