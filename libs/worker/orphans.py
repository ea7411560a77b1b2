"""Work that nobody waits for: its gateway is gone, or has ended the request, and the Abort was lost on the way.

A gateway is asked about what has been here for a while. What two rounds in a row find given up is aborted. A mistake
costs time only: the gateway finds out that its request is not owed any more, and places it again.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

from libs.service.auditing import ask
from libs.service.bus import Bus
from libs.service.logs import get_logger
from libs.wire import subjects
from libs.wire.errors import BatonError, NoResponder
from libs.wire.messages import Generate, Prefill

INTERVAL_S: Final = 5.0  # and the age at which a request is asked about
TIMEOUT_S: Final = 2.0
log = get_logger()

Attempt = tuple[str, int]


class Orphans:
    """`requests` are those that the worker has in hand; `abort` ends an attempt and all before it."""

    def __init__(
        self,
        bus: Bus,
        requests: Callable[[], Iterable[Generate | Prefill]],
        abort: Callable[[str, int], None],
    ) -> None:
        self._bus = bus
        self._requests = requests
        self._abort = abort
        self._suspects: set[Attempt] = set()  # of the round before

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """One round."""
        found: set[Attempt] = set()
        for gateway_id, attempts in self._old().items():
            found |= await self._given_up(gateway_id, attempts)
        for request_id, attempt in found & self._suspects:
            log.warning("nobody waits for this any more", request_id=request_id, attempt=attempt)
            self._abort(request_id, attempt)
        self._suspects = found - self._suspects

    def _old(self) -> dict[str, list[Attempt]]:
        """By gateway."""
        before_ns = time.time_ns() - int(INTERVAL_S * 1e9)
        old: defaultdict[str, list[Attempt]] = defaultdict(list)
        for request in self._requests():
            if request.sent_ns <= before_ns:
                old[request.gateway_id].append((request.request_id, request.attempt))
        return old

    async def _given_up(self, gateway_id: str, attempts: list[Attempt]) -> set[Attempt]:
        try:
            debts = await ask(self._bus, subjects.audit("gateway", gateway_id), attempts, TIMEOUT_S)
        except NoResponder:
            return set(attempts)
        except BatonError:  # slow, or NATS is away: nothing is known
            return set()
        return {attempt for attempt, debt in zip(attempts, debts, strict=False) if not debt.owed}
