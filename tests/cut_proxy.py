"""A TCP proxy that cuts the connection in the middle: after so many bytes of the answer, or of the request."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Literal, Self

_CHUNK = 4096
_TIMEOUT_S = 30.0


class CutProxy:
    """Passes bytes to and from 127.0.0.1:`port` until `after_bytes` went in `direction`; then calls `cut` and closes.

    "down": to the client. Connections that come later are refused.
    """

    def __init__(
        self, port: int, direction: Literal["up", "down"], after_bytes: int, cut: Callable[[], None]
    ) -> None:
        self.was_cut = threading.Event()
        self._target = port
        self._direction = direction
        self._left = after_bytes
        self._cut = cut
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_TIMEOUT_S)

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target), timeout=_TIMEOUT_S)
                client.settimeout(_TIMEOUT_S)
                self._sockets += [client, server]
                for source, target, direction in ((client, server, "up"), (server, client, "down")):
                    threading.Thread(target=self._pump, args=(source, target, direction), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                target.sendall(data)
                if direction == self._direction and self._is_over(len(data)):
                    self._cut()
                    self._close()
                    self.was_cut.set()

    def _is_over(self, num_bytes: int) -> bool:
        with self._lock:
            before = self._left
            self._left -= num_bytes
            return before > 0 >= self._left

    def _close(self) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
