"""Which objects a store has, who uses them, and which should go. The coordinator and the simulator run the same.

    listing, news ──► add, remove, seen ──► index ──► run, locate       which blocks of a prompt are there, and where
                                    use ──►       ──► victims           what to delete: expired, over quota, no room

No I/O and no clock. All times are seconds on one clock, that of the store's listing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from libs.store.blocks import BlockMap, index_of
from libs.store.key import KEY_BYTES, ObjectKey
from libs.store.leaves import Leaves
from libs.store.lru import Lru
from libs.store.order import Entry, EvictionPolicy, Looks
from libs.store.scan import Scan

DEFAULT_HIGH = 0.98  # the rest is room for what is written between two evictions
DEFAULT_LOW = 0.97  # every hundredth less than 1 costs 0.1 points of 34 on Mooncake's trace with 16M tokens
MAX_LOOKS = 4096  # at objects, in one call of `victims`: a few tens of milliseconds
_STEP_S = 1e-6  # between an object of a chain and its child, when a request has used both


@dataclass(frozen=True, slots=True)
class Located:
    """Blocks `first ...` of the object at `path` are the names `start ...` that were asked for, `count` of them."""

    path: str
    first: int
    start: int
    count: int


class StoreIndex:
    """All objects of one store. Costs are O(objects that an operation touches).

    `capacity_bytes` counts whole objects. Above `high` of it, objects are deleted down to `low` of it; a tenant that
    has more than `tenant_share` of it loses own objects in the same proportion. `ttl_s`: an object that is unused for
    so long goes.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        *,
        capacity_bytes: int,
        high: float = DEFAULT_HIGH,
        low: float = DEFAULT_LOW,
        ttl_s: float | None = None,
        tenant_share: float = 1.0,
    ) -> None:
        if capacity_bytes < 1 or not 0 < low <= high <= 1 or not 0 < tenant_share <= 1:
            raise ValueError(f"{capacity_bytes=}, {low=}, {high=}, {tenant_share=}")
        if ttl_s is not None and ttl_s <= 0:
            raise ValueError(f"{ttl_s=}")
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self.num_blocks = 0  # a block that two objects have counts twice
        self.tenant_bytes: dict[str, int] = {}  # by tenant tag
        self._high, self._low = high, low
        self._ttl_s = ttl_s
        self._quota_bytes = tenant_share * capacity_bytes
        self._policy = policy
        self._ages = Lru() if ttl_s is not None else None
        self._orders = [policy] if self._ages is None else [policy, self._ages]
        self._entries: dict[str, Entry] = {}
        self._blocks = BlockMap()
        self._leaves = Leaves()
        self._shrinking: set[str | None] = set()  # tenants, or the store (None), on the way down to `low`
        self._doomed: set[str] = set()  # victims whose deletion is not confirmed
        self._scan = Scan()

    @property
    def num_objects(self) -> int:
        return len(self._entries)

    # ------------------------------------------------------------ what is there

    def add(self, path: str, num_bytes: int, now_s: float) -> bool:
        """Counts an object that was just written. False: it was known. Raises ValueError for a path that is no key."""
        self._doomed.discard(path)
        return self._add(path, num_bytes, now_s)

    def remove(self, path: str) -> bool:
        """Forgets an object that was, or is about to be, deleted. True: it was there, or a victim until now."""
        self._scan.forget(path)
        entry = self._entries.get(path)
        if entry is not None:
            self._drop(entry, evicted=False)
        was_doomed = path in self._doomed
        self._doomed.discard(path)
        return entry is not None or was_doomed

    def begin_scan(self) -> None:
        """A listing begins, in place of one that has not ended."""
        self._scan.begin()

    def seen(self, path: str, num_bytes: int, used_s: float) -> None:
        """The listing has this object. One that was deleted since the listing began stays deleted.

        Raises ValueError for a path that is no key, RuntimeError without `begin_scan`.
        """
        self._scan.check_open()
        if not self._scan.was_forgotten(path) and path not in self._doomed:
            self._add(path, num_bytes, used_s)

    def end_scan(self) -> int:
        """Drops what was there before the listing and is not in it; returns how many objects that are.

        What was added meanwhile stays. Raises RuntimeError without `begin_scan`.
        """
        unseen = self._scan.end(self._entries.values())
        for entry in unseen:
            self._drop(entry, evicted=False)
        return len(unseen)

    def abandon_scan(self) -> None:
        """The listing failed: nothing is dropped. What was seen stays. Idempotent."""
        self._scan.abandon()

    # ------------------------------------------------------------ questions

    def run(self, names: Sequence[bytes]) -> int:
        """Leading blocks that are in the store. `names`: 32 bytes each, of consecutive blocks of any chain."""
        return self._blocks.run(names)

    def locate(self, names: Sequence[bytes]) -> list[Located]:
        """Where the blocks of that run are, in order."""
        return [
            Located(span.entry.path, span.first, span.start, span.num_blocks)
            for span in self._blocks.cover(names)
        ]

    def use(self, names: Sequence[bytes], now_s: float) -> int:
        """A request uses these blocks, the first of its prompt. Returns `run(names)`.

        All objects of the run are recent now, each a little older than the one before.
        """
        used = 0
        for number, span in enumerate(self._blocks.cover(names)):
            entry = span.entry
            entry.used_s = max(entry.used_s, now_s - number * _STEP_S)
            entry.uses += 1
            entry.first = max(0, span.start - span.first)
            self._policy.used(entry)
            used = span.start + span.num_blocks
        return used

    # ------------------------------------------------------------ eviction

    def victims(self, now_s: float, max_looks: int = MAX_LOOKS) -> list[str]:
        """Paths of objects to delete now, children before parents. What is left to find after `max_looks`: next time.

        They are found no more, and no listing brings them back until `remove` has confirmed them. One whose deletion
        fails is confirmed too: the next listing tells that it is still there.
        """
        paths = list[str]()
        self._expire(
            now_s, Looks(max_looks), paths
        )  # each has looks of its own, so that none keeps the others off
        looks = Looks(max_looks)
        for tenant in self._tenants_over_quota():
            self._shrink(tenant, looks, paths)
        self._shrink(None, Looks(max_looks), paths)
        self._doomed.update(paths)
        return paths

    def _expire(self, now_s: float, looks: Looks, paths: list[str]) -> None:
        if self._ages is not None and self._ttl_s is not None:
            last_s = now_s - self._ttl_s
            tenants = list(self.tenant_bytes)
            self._evict(self._ages, tenants, lambda entry: entry.used_s <= last_s, looks, paths)

    def _tenants_over_quota(self) -> list[str]:
        if self._quota_bytes >= self.capacity_bytes:
            return []
        return [
            tenant
            for tenant, num_bytes in self.tenant_bytes.items()
            if num_bytes > self._quota_bytes or tenant in self._shrinking
        ]

    def _shrink(self, tenant: str | None, looks: Looks, paths: list[str]) -> None:
        """Evicts down to the low mark, over as many calls as that takes. `tenant` None: from all tenants."""
        if tenant is None:
            most, least = self._high * self.capacity_bytes, self._low * self.capacity_bytes
        else:
            most, least = self._quota_bytes, self._quota_bytes * self._low / self._high

        def size() -> int:
            return self.num_bytes if tenant is None else self.tenant_bytes.get(tenant, 0)

        if size() > most:
            self._shrinking.add(tenant)
        if tenant in self._shrinking:
            tenants = list(self.tenant_bytes) if tenant is None else [tenant]
            self._evict(self._policy, tenants, lambda entry: size() > least, looks, paths)
            if size() <= least:
                self._shrinking.discard(tenant)

    def _evict(
        self,
        order: EvictionPolicy,
        tenants: Iterable[str],
        wanted: Callable[[Entry], bool],
        looks: Looks,
        paths: list[str],
    ) -> None:
        """Takes leaves in `order`, the lowest rank of all tenants first, while the next one is `wanted`."""
        leaves = (self._leaves.pop(order, tenant, looks) for tenant in tenants)
        ready = [(order.rank(entry), entry) for entry in leaves if entry is not None]
        heapify(ready)
        while ready and wanted(ready[0][1]):
            _, entry = heappop(ready)
            self._drop(entry, evicted=True)
            paths.append(entry.path)
            following = self._leaves.pop(order, entry.tenant, looks)
            if following is not None:
                heappush(ready, (order.rank(following), following))
        for _, entry in ready:
            order.put_back(entry)

    # ------------------------------------------------------------ inside

    def _add(self, path: str, num_bytes: int, used_s: float) -> bool:
        known = self._entries.get(path)
        if known is not None:
            known.used_s = max(known.used_s, used_s)
            self._scan.mark(known)
            return False
        key = ObjectKey.parse(path)
        num_bytes = max(1, num_bytes)  # an empty one is damaged, and still has to expire
        entry = Entry(path, sys.intern(key.tenant), key.parent, b"".join(key.blocks), num_bytes, used_s)
        entry.first = self._blocks_before(key.parent)
        self._scan.mark(entry)
        self._entries[path] = entry
        self._blocks.add(entry, key.blocks)
        if key.parent in key.blocks:  # only a forged path says so; it must not wait for itself
            entry.parent = b""
        self._leaves.added(entry)
        self._count(entry, 1)
        for order in self._orders:
            order.added(entry)
        return True

    def _blocks_before(self, parent: bytes) -> int:
        """Of a chain that goes on behind `parent`; 0 where that is not known (yet)."""
        entry = self._blocks.get(parent)
        return 0 if entry is None else entry.first + index_of(parent, entry.keys) + 1

    def _drop(self, entry: Entry, *, evicted: bool) -> None:
        entry.gone = True
        del self._entries[entry.path]
        self._blocks.remove(entry)
        self._count(entry, -1)
        for order in self._orders:
            order.removed(entry, evicted=evicted)
        self._leaves.removed(entry)

    def _count(self, entry: Entry, sign: int) -> None:
        self.num_bytes += sign * entry.num_bytes
        self.num_blocks += sign * (len(entry.keys) // KEY_BYTES)
        left = self.tenant_bytes.get(entry.tenant, 0) + sign * entry.num_bytes
        if left:
            self.tenant_bytes[entry.tenant] = left
        else:
            self.tenant_bytes.pop(entry.tenant, None)
