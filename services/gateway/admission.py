"""How many requests a gateway owns at once. Beyond that it refuses at once rather than queueing without bound."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from libs.wire.errors import Code, RequestRefused

RETRY_AFTER_S: Final = 1.0


class Admission:
    """Counts requests from their arrival to their end, however they end."""

    def __init__(self, max_inflight: int) -> None:
        self._max_inflight = max_inflight
        self._inflight = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def inflight(self) -> int:
        return self._inflight

    @property
    def draining(self) -> bool:
        return self._draining

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Holds a place for the body of the `with`. Raises RequestRefused: OVERLOADED when full, or DRAINING."""
        if self._draining:
            raise RequestRefused(
                Code.DRAINING, "the gateway is shutting down", retryable=True, retry_after_s=RETRY_AFTER_S
            )
        if self._inflight >= self._max_inflight:
            message = f"{self._inflight} requests are being served, which is the limit; try again later"
            raise RequestRefused(Code.OVERLOADED, message, retryable=True, retry_after_s=RETRY_AFTER_S)
        self._inflight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._inflight -= 1
            if self._inflight == 0:
                self._idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the running ones. False: some were still running at the deadline."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
