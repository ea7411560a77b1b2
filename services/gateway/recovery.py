"""Whether a request that failed is tried again, and with whom. One of these for each request.

a worker fails it        another one, three times at most without a new token in between
its worker is lost       the same
one does not take it     another one, which does not count; where there is none, one that comes back within `recovery_s`
nothing helps            the failure that the client is told is the last real one, not that nobody is left
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from libs.wire.errors import BatonError, Code
from services.gateway.fleet import Fleet

MAX_ATTEMPTS: Final = 3  # without a new token
RETURN_POLL_S: Final = 0.1


class Recovery:
    """`recovery_s` is how long, in all, a request without a new token waits for a worker."""

    def __init__(self, fleet: Fleet, recovery_s: float) -> None:
        self._fleet = fleet
        self._recovery_s = recovery_s
        self._exclude: set[str] = set()
        self._fruitless = 0  # attempts since the last token
        self._lost_s: float | None = None  # since when there is no worker (monotonic)

    @property
    def exclude(self) -> frozenset[str]:
        """Workers that have just failed this request."""
        return frozenset(self._exclude)

    def progressed(self) -> None:
        """A token came: whatever happens next is a new story."""
        self._fruitless, self._lost_s = 0, None

    def may_retry(self, failure: BatonError, decode: str | None) -> bool:
        """Counts the failure of an attempt, which `decode` had if it is known."""
        self._fruitless += 1
        if decode is not None:
            self._exclude.add(decode)
        return failure.retryable and self._fruitless < MAX_ATTEMPTS

    def unreachable(self, decode: str | None) -> None:
        """This worker did not take the request; while there are others, they are asked."""
        if decode is not None:
            self._exclude.add(decode)

    async def worker_returns(self, failure: BatonError, is_late: Callable[[], bool]) -> bool:
        """With nobody left to try: waits for a decode worker, if `failure` is that the last one was lost.

        False when that takes too long, or `is_late()`.
        """
        if failure.code is not Code.WORKER_LOST:
            return False
        self._exclude.clear()  # a worker that was silent, or a new one of that name
        self._lost_s = self._lost_s or time.monotonic()
        while time.monotonic() - self._lost_s <= self._recovery_s and not is_late():
            await asyncio.sleep(RETURN_POLL_S)
            if self._fleet.serving("decode"):
                return True
        return False
