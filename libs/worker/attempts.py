"""Which attempts of which requests are begun or void.

A submission may come twice (its reply was lost), also after its work is done; an Abort may overtake it, come
twice, or come for nothing.
"""

from __future__ import annotations

from collections import OrderedDict


class Attempts:
    """Remembers, of the last `capacity` requests each, the newest attempt begun and the newest aborted."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._begun: OrderedDict[str, int] = OrderedDict()
        self._aborted: OrderedDict[str, int] = OrderedDict()

    def begin(self, request_id: str, attempt: int) -> bool:
        """False if this attempt or a newer one was begun before: it is not to be done again."""
        if attempt <= self._begun.get(request_id, -1):
            return False
        self._note(self._begun, request_id, attempt)
        return True

    def abort(self, request_id: str, attempt: int) -> None:
        """From now on, `attempt` and older ones of this request are void."""
        self._note(self._aborted, request_id, max(attempt, self._aborted.get(request_id, 0)))

    def is_void(self, request_id: str, attempt: int) -> bool:
        return attempt <= self._aborted.get(request_id, -1)

    def _note(self, table: OrderedDict[str, int], request_id: str, attempt: int) -> None:
        table[request_id] = attempt
        table.move_to_end(request_id)
        if len(table) > self._capacity:
            table.popitem(last=False)


def engine_id(request_id: str, attempt: int) -> str:
    """What an engine knows an attempt by: two attempts of one request may meet in one worker."""
    return f"{request_id}#{attempt}"
