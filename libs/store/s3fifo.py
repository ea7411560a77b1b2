"""S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).

small   a tenth of the bytes; what is new comes here, and leaves soon unless it is used twice
main    what was: at the end of the queue, each use since has bought it another round
ghost   names of what left small, as many as main has objects: who comes again enters main
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from libs.store.key import KEY_BYTES
from libs.store.order import Entry, Looks

SMALL_SHARE = 0.1
MOST_FREQUENCY = 3  # two bits

_IN_MAIN = 4  # bits of `Entry.state`; the lower two are the frequency
_POPPED = 8


@dataclass(slots=True)
class _Queues:
    """Of one tenant. The first of a queue is the oldest."""

    small: OrderedDict[Entry, None] = field(default_factory=OrderedDict)
    main: OrderedDict[Entry, None] = field(default_factory=OrderedDict)
    ghost: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    small_bytes: int = 0
    main_bytes: int = 0

    def put(self, entry: Entry, *, main: bool, first: bool = False) -> None:
        queue = self.main if main else self.small
        queue[entry] = None
        if first:
            queue.move_to_end(entry, last=False)
        self._count(entry, main, entry.num_bytes)

    def take(self, entry: Entry, *, main: bool) -> None:
        del (self.main if main else self.small)[entry]
        self._count(entry, main, -entry.num_bytes)

    def next_is_small(self) -> bool:
        if not self.main:
            return True
        return bool(self.small) and self.small_bytes >= SMALL_SHARE * (self.small_bytes + self.main_bytes)

    def remember(self, name: bytes) -> None:
        self.ghost[name] = None
        self.ghost.move_to_end(name)
        while len(self.ghost) > max(1, len(self.main)):
            self.ghost.popitem(last=False)

    def _count(self, entry: Entry, main: bool, num_bytes: int) -> None:
        if main:
            self.main_bytes += num_bytes
        else:
            self.small_bytes += num_bytes


class S3Fifo:
    """The three queues for each tenant. An object's name is its first block's: the rest follows from the writer."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Queues] = {}

    def added(self, entry: Entry) -> None:
        queues = self._tenants.setdefault(entry.tenant, _Queues())
        name = _name(entry)
        main = name in queues.ghost
        if main:
            del queues.ghost[name]
        entry.state = _IN_MAIN if main else 0
        queues.put(entry, main=main)

    def used(self, entry: Entry) -> None:
        if entry.state & MOST_FREQUENCY < MOST_FREQUENCY:
            entry.state += 1

    def pop(self, tenant: str, looks: Looks) -> Entry | None:
        queues = self._tenants.get(tenant)
        while queues is not None and (queues.small or queues.main) and looks.take():
            main = not queues.next_is_small()
            entry = next(iter(queues.main if main else queues.small))
            frequency = entry.state & MOST_FREQUENCY
            queues.take(entry, main=main)
            if main and frequency:
                entry.state -= 1
                queues.put(entry, main=True)
            elif frequency > 1:
                entry.state = _IN_MAIN  # its uses were for the way here
                queues.put(entry, main=True)
            else:
                entry.state |= _POPPED
                return entry
        return None

    def put_back(self, entry: Entry) -> None:
        entry.state &= ~_POPPED
        self._tenants[entry.tenant].put(entry, main=bool(entry.state & _IN_MAIN), first=True)

    def rank(self, entry: Entry) -> float:
        return entry.used_s

    def removed(self, entry: Entry, *, evicted: bool) -> None:
        queues = self._tenants[entry.tenant]
        main = bool(entry.state & _IN_MAIN)
        if not entry.state & _POPPED:
            queues.take(entry, main=main)
        if evicted and not main:
            queues.remember(_name(entry))


def _name(entry: Entry) -> bytes:
    return entry.keys[:KEY_BYTES]
