"""Who answers: the processes on the bus, and the gateway over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from libs.service.bus import Bus
from libs.wire import subjects
from libs.wire.errors import BatonError
from libs.wire.messages import ServiceStatus, StatusRequest

CONNECT_TIMEOUT_S = 2.0
_HTTP_TIMEOUT_S = 2.0


async def gather_status(bus: Bus, window_s: float) -> list[ServiceStatus]:
    """What every process that answers within the window says of itself, by service and id."""
    replies = await bus.gather(subjects.STATUS, StatusRequest(), ServiceStatus, window_s=window_s)
    return sorted(replies, key=lambda status: (status.service, status.instance_id))


class StatusWatch:
    """Asks again and again; a bus that is away is an empty answer, and is tried again the next time."""

    def __init__(self, nats_url: str) -> None:
        self._nats_url = nats_url
        self._bus: Bus | None = None

    async def poll(self, window_s: float) -> list[ServiceStatus]:
        """Takes `window_s` even where the answer, or that there is none, comes sooner."""
        pause = asyncio.create_task(asyncio.sleep(window_s))
        try:
            if self._bus is None:
                self._bus = await Bus.connect(self._nats_url, "baton-up", timeout_s=CONNECT_TIMEOUT_S)
            return await gather_status(self._bus, window_s)
        except (BatonError, OSError, TimeoutError):
            return []
        finally:
            await pause

    async def close(self) -> None:
        """Idempotent."""
        bus, self._bus = self._bus, None
        if bus is not None:
            with contextlib.suppress(BatonError, OSError, TimeoutError):
                await asyncio.wait_for(bus.close(), CONNECT_TIMEOUT_S)


async def http_status(host: str, port: int, path: str, *, tls: bool) -> int | None:
    """Status of a GET, or None when nothing answers in time. No certificate is checked: it is our own gateway."""
    request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
    try:
        async with asyncio.timeout(_HTTP_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=_any_certificate() if tls else None
            )
            try:
                writer.write(request.encode("ascii"))
                status_line = await reader.readline()
            finally:
                writer.close()
        return int(status_line.split()[1])
    except (OSError, TimeoutError, ValueError, IndexError):
        return None


def probe_host(host: str) -> str:
    """Where to reach, from this machine, a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def http_url(host: str, port: int, *, tls: bool) -> str:
    host, scheme = probe_host(host), "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _any_certificate() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
