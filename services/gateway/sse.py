"""Server-sent events to one client, who may be slow, or gone."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

WRITE_TIMEOUT_S: Final = 30.0  # a client that reads nothing for so long is gone
DONE: Final = b"data: [DONE]\n\n"
KEEPALIVE: Final = b": waiting\n\n"  # a comment; clients skip it, proxies see life


class ClientGone(Exception):
    """Nobody reads this answer any more."""


def is_gone(request: web.Request) -> bool:
    """Whether the client has hung up: a handler is cancelled when it does, but not if that was before it began."""
    return request.transport is None or request.transport.is_closing()


def event(payload: bytes) -> bytes:
    """One event; `payload` is JSON, which holds no line breaks."""
    return b"data: " + payload + b"\n\n"


class EventStream:
    """The headers go out with the first event, so that what fails before it can still be a plain error."""

    def __init__(self, request: web.Request, write_timeout_s: float = WRITE_TIMEOUT_S) -> None:
        self._request = request
        self._write_timeout_s = write_timeout_s
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    @property
    def started(self) -> bool:
        return self._response.prepared

    async def send(self, data: bytes) -> None:
        """Raises ClientGone, at the latest after the write deadline."""
        try:
            async with asyncio.timeout(self._write_timeout_s):
                if not self._response.prepared:
                    await self._response.prepare(self._request)
                await self._response.write(data)
        except (TimeoutError, ConnectionError) as error:
            if (transport := self._request.transport) is not None:
                transport.abort()
            raise ClientGone(str(error)) from None

    async def end(self, *, failed: bool = False) -> web.StreamResponse:
        """Closes the answer; after a failure the connection too, so that nobody waits for more."""
        if failed:
            self._response.force_close()
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._response.write_eof()
        except (TimeoutError, ConnectionError) as error:
            raise ClientGone(str(error)) from None
        return self._response
