"""In which order a trace's requests come: a virtual clock, and so many sessions at once."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from libs.bench.cache.trace import Request, Session, Trace


@dataclass(frozen=True, slots=True)
class Arrival:
    """`session` is the number of a session in the trace."""

    now_s: float
    session: int
    request: Request


def arrivals(trace: Trace, num_slots: int) -> Iterator[Arrival]:
    """All requests by time. A session starts when one of `num_slots` slots is free, or by the trace's own clock.

    A slot is free again when the last answer of its session is complete.
    """
    waiting = iter(enumerate(trace.sessions))
    running: list[tuple[float, int, int]] = []  # time of the next request, session, its number there
    starts_s: dict[int, float] = {}

    def begin(number: int, session: Session, start_s: float) -> None:
        starts_s[number] = start_s
        heapq.heappush(running, (start_s + session.requests[0].at_s, number, 0))

    for number, session in waiting:
        begin(number, session, 0.0)
        if len(running) == num_slots and not trace.has_own_times:
            break
    while running:
        now_s, number, at = heapq.heappop(running)
        session = trace.sessions[number]
        yield Arrival(now_s, number, session.requests[at])
        if at + 1 < len(session.requests):
            heapq.heappush(running, (starts_s[number] + session.requests[at + 1].at_s, number, at + 1))
            continue
        ended_s = starts_s.pop(number) + session.length_s
        following = next(waiting, None)
        if following is not None:
            begin(*following, ended_s)
