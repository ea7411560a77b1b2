"""Asking another process what is open between it and us. NATS may lose any message; this finds out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from libs.service.bus import Bus
from libs.wire.messages import Audit, Audited, Debt

MAX_ATTEMPTS: Final = 512  # in one message


async def ask(bus: Bus, subject: str, attempts: Sequence[tuple[str, int]], timeout_s: float) -> list[Debt]:
    """What is owed of each (request id, attempt), in their order. Raises what `Bus.request` does."""
    debts: list[Debt] = []
    for start in range(0, len(attempts), MAX_ATTEMPTS):
        part = tuple(attempts[start : start + MAX_ATTEMPTS])
        audited = await bus.request(subject, Audit(attempts=part), Audited, timeout_s=timeout_s)
        debts += audited.debts
    return debts
