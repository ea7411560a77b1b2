"""What is deleted first when a store runs out of room: the interface, and what all policies share.

The index keeps the rule that no policy may break: leaves first. A policy only puts objects into an order. The index
pops from it; an object that others in the store build on is set aside until they are gone, and then put back. So a
chain goes from its tail, and a policy need not know about chains.

    added ──► in the order ──pop──► evicted                                 (it was a leaf)
                   ▲  └────────pop──► set aside ──its children go──► put back
                   └──────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from heapq import heapify, heappop, heappush
from typing import Protocol

_SLACK = 64  # dead entries that a heap may have before it is worth tidying


class Entry:
    """One object of the store. `keys`: of its blocks, one behind the other. `first`: of the blocks before it.

    `state` and `rank` belong to the policy; `uses` counts requests that used it since it was added.
    """

    __slots__ = (
        "first",
        "gone",
        "keys",
        "num_bytes",
        "parent",
        "path",
        "rank",
        "scan",
        "state",
        "tenant",
        "used_s",
        "uses",
    )

    def __init__(
        self, path: str, tenant: str, parent: bytes, keys: bytes, num_bytes: int, used_s: float
    ) -> None:
        self.path = path
        self.tenant = tenant
        self.parent = parent
        self.keys = keys
        self.num_bytes = num_bytes
        self.used_s = used_s
        self.uses = 0
        self.first = 0
        self.rank = 0.0
        self.state = 0
        self.scan = 0
        self.gone = False

    def __lt__(self, other: Entry) -> bool:
        """Settles ties of rank: the one that was used longer ago, and in any case the same in every run."""
        return (self.used_s, self.path) < (other.used_s, other.path)


class Looks:
    """How many entries one search for victims may look at: most of them may turn out to be in use, or no leaves."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self) -> bool:
        """One look more. False: there is none left."""
        self.left -= 1
        return self.left >= 0


class EvictionPolicy(Protocol):
    """An order of objects for each tenant. Deterministic; no clock: an entry says when it was last used."""

    def added(self, entry: Entry) -> None:
        """`entry` is new in the store."""
        ...

    def used(self, entry: Entry) -> None:
        """`entry.used_s` and `entry.uses` have just changed."""
        ...

    def pop(self, tenant: str, looks: Looks) -> Entry | None:
        """Takes the tenant's entry that should go next out of the order; None without one, or without looks left."""
        ...

    def put_back(self, entry: Entry) -> None:
        """An entry that was popped stays for now, and is the first to be asked for again unless used since."""
        ...

    def rank(self, entry: Entry) -> float:
        """Compares popped entries of different tenants: the lower goes first."""
        ...

    def removed(self, entry: Entry, *, evicted: bool) -> None:
        """`entry` is gone, and `entry.gone` set: `evicted` on this index' decision, or deleted by somebody else."""
        ...


class RankedOrder(ABC):
    """An order by a number that only ever grows while an entry is in the store: one heap for each tenant.

    A use does not touch the heap: an entry whose rank has grown since it was pushed is pushed again when it comes up.
    """

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[float, Entry]]] = {}
        self._dead: dict[str, int] = {}  # entries in the heap that are gone, at most

    @abstractmethod
    def rank(self, entry: Entry) -> float: ...

    def added(self, entry: Entry) -> None:
        heappush(self._heaps.setdefault(entry.tenant, []), (self.rank(entry), entry))

    def put_back(self, entry: Entry) -> None:
        self.added(entry)

    def pop(self, tenant: str, looks: Looks) -> Entry | None:
        heap = self._heaps.get(tenant, [])
        while heap:
            if not looks.take():
                return None
            pushed_rank, entry = heappop(heap)
            if entry.gone:
                continue
            rank = self.rank(entry)
            if rank <= pushed_rank:
                return entry
            heappush(heap, (rank, entry))
        self._heaps.pop(tenant, None)
        self._dead.pop(tenant, None)
        return None

    def removed(self, entry: Entry, *, evicted: bool) -> None:
        heap = self._heaps.get(entry.tenant)
        if heap is None:
            return
        dead = self._dead.get(entry.tenant, 0) + 1
        if dead > _SLACK + len(heap) // 2:
            heap[:] = [each for each in heap if not each[1].gone]
            heapify(heap)
            dead = 0
        self._dead[entry.tenant] = dead
