"""One connection to NATS that comes back: nats-py's reconnect, and a new client where nats-py gives up.

nats-py reconnects after a lost socket, keeps subscriptions and buffers publishes meanwhile. After an error
line from the server (revoked credentials, a protocol error) it closes for good; then a fresh client is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from nats.aio.client import Client, Server
from nats.aio.subscription import Subscription as NatsSubscription
from nats.errors import Error as NatsError
from nats.errors import SlowConsumerError

from libs.service.logs import get_logger
from libs.wire.errors import BusError

_log = get_logger(__name__)

PENDING_LIMIT_BYTES = 8 * 1024 * 1024  # waits in this process while the server is away or slow
_CONNECT_ATTEMPT_S = 2
_PING_INTERVAL_S = 5  # a silent server is noticed after 2 to 3 of these
_UNACKNOWLEDGED_S = 10.0
_FLUSH_TIMEOUT_S = 2.0
_CLOSE_TIMEOUT_S = 2.0
_BACKOFF_S = (0.05, 2.0)


async def finish_within(work: Coroutine[Any, Any, Any], timeout_s: float) -> bool:
    """Runs `work`; False when it was not done in time (then it is cancelled). Raises what `work` raised.

    Not `asyncio.timeout`: nats-py swallows a cancellation in places, which would leave no deadline at all.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        return False
    task.result()
    return True


def redact(url: str) -> str:
    """`url` without user and password, fit for logs."""
    return ",".join(_redact_one(part.strip()) for part in url.split(","))


def _redact_one(url: str) -> str:
    if "@" not in url:
        return url
    scheme = urlsplit(url).scheme if "://" in url else "nats"
    return f"{scheme}://***@{url.rpartition('@')[2]}"


class Connection:
    """Owns the nats-py client. `client` may be another object after an await: do not keep it."""

    def __init__(
        self,
        url: str,
        name: str,
        *,
        on_new_client: Callable[[Client], Awaitable[None]],
        on_slow_consumer: Callable[[NatsSubscription], None],
    ) -> None:
        self.url = redact(url)
        self.client = Client()
        self.num_reconnects = 0
        self._servers = [part.strip() for part in url.split(",")]
        self._name = name
        self._on_new_client = on_new_client
        self._on_slow_consumer = on_slow_consumer
        self._up = asyncio.Event()
        self._opened = False
        self._closing = False
        self._revival: asyncio.Task[None] | None = None
        self._last_error: Exception | None = None
        self._refusal: Exception | None = None  # what the server said before it hung up

    @property
    def is_connected(self) -> bool:
        # nats-py says it is connected a little before its subscriptions are back, and `_up` is set a little
        # longer than it is.
        return self.client.is_connected and self._up.is_set() and not self._closing

    async def open(self, timeout_s: float) -> None:
        """Raises BusError, with the address and what to do, when no server accepts us within `timeout_s`."""
        client = Client()
        try:
            if await finish_within(self._connect(client), timeout_s) and client.is_connected:
                self.client = client
                self._opened = True
                self._up.set()
                return
            reason = self._refusal or self._last_error or f"no answer within {timeout_s:g} s"
        except (NatsError, OSError, ValueError) as error:
            reason = self._refusal or error
        await self._abandon(client)
        raise BusError(
            "",
            f"cannot connect to NATS at {self.url}: {reason}. Is the server running there? "
            "`baton up` starts one; BATON_NATS_URL or --nats names another",
        )

    async def wait_until_up(self, timeout_s: float) -> bool:
        """True as soon as there is a connection, False when there is none after `timeout_s`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self.is_connected:
            left_s = deadline - asyncio.get_running_loop().time()
            if self._closing or left_s <= 0:
                return False
            wait = asyncio.sleep(0.01) if self._up.is_set() else self._up.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await wait
        return True

    async def close(self) -> None:
        """Sends what is buffered, then closes; bounded in time, idempotent."""
        self._closing = True
        if self._revival is not None:
            self._revival.cancel()
        await self._abandon(self.client)
        self._up.set()  # wakes those who wait: they see that it is closed

    async def _connect(self, client: Client) -> None:
        await client.connect(
            servers=self._servers,
            name=self._name,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=_BACKOFF_S[0] * 4,  # type: ignore[arg-type]  # any number of seconds works
            reconnect_to_server_handler=_next_server,
            connect_timeout=_CONNECT_ATTEMPT_S,
            ping_interval=_PING_INTERVAL_S,
            # Twice our own limit: `Bus` waits for room before nats-py would block a publisher by itself.
            pending_size=2 * PENDING_LIMIT_BYTES,
            flush_timeout=_FLUSH_TIMEOUT_S,
        )
        await client.flush(timeout=_CONNECT_ATTEMPT_S)
        _limit_silence(client)

    async def _abandon(self, client: Client) -> None:
        if client.is_closed:
            return
        try:
            await finish_within(client.close(), _CLOSE_TIMEOUT_S)
        except Exception as error:  # nats-py may fail in many ways on a broken socket; it is gone anyway
            _log.debug("closing the NATS client failed", error=repr(error))

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        if "authorization" in str(error).lower():
            self._refusal = error  # the lost socket that follows it says less
        if isinstance(error, SlowConsumerError):
            self._on_slow_consumer(error.sub)
        elif "permissions violation" in str(error).lower():
            _log.error("NATS denied a subject", error=str(error))
        elif isinstance(error, NatsError | OSError):
            _log.debug("NATS client error", error=repr(error))
        else:
            _log.error("unexpected error in the NATS client", exc_info=error)

    async def _on_disconnected(self) -> None:
        if self._up.is_set():
            self._up.clear()
            if not self._closing:
                _log.warning("lost the connection to NATS", url=self.url, error=str(self._last_error or ""))

    async def _on_reconnected(self) -> None:
        _limit_silence(self.client)
        self.num_reconnects += 1
        self._up.set()
        _log.info("connected to NATS again", url=self.url)

    async def _on_closed(self) -> None:
        if not self._opened or self._closing or self._revival is not None:
            return
        _log.error("NATS closed the connection; making a new one", error=str(self.client.last_error))
        self._revival = asyncio.get_running_loop().create_task(self._revive())

    async def _revive(self) -> None:
        attempt = 0
        while not self._closing:
            await asyncio.sleep(_backoff_s(attempt))
            attempt += 1
            client = Client()
            try:
                if await finish_within(self._connect(client), 4 * _CONNECT_ATTEMPT_S) and client.is_connected:
                    await self._on_new_client(client)
                    if not client.is_closed:
                        self.client, self._revival = client, None
                        await self._on_reconnected()
                        return
            except (NatsError, OSError) as error:
                self._last_error = error
            await self._abandon(client)


def _backoff_s(attempt: int) -> float:
    first, longest = _BACKOFF_S
    return min(longest, first * 2.0 ** min(attempt, 16)) * random.uniform(0.5, 1.0)


def _limit_silence(client: Client) -> None:
    """Ends the socket when the server's machine has not acknowledged data for a while.

    Before nats-py reconnects it waits until the old socket's buffer is sent, which a machine that lost its
    power never takes.
    """
    writer = getattr(client._transport, "_io_writer", None)
    connection = writer.get_extra_info("socket") if writer is not None else None
    if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_UNACKNOWLEDGED_S * 1000))


def _next_server(servers: list[Server], info: dict[str, Any]) -> tuple[Server | None, float]:
    """The server that failed least, and how long to wait before trying it."""
    best = min(servers, key=lambda server: server.reconnects)
    return best, _backoff_s(best.reconnects) if best.reconnects else 0.0
