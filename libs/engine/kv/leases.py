"""Leases: blocks that a peer may pull stay pinned until the lease is released or runs out.

A dead or forgetful peer costs blocks for `lease_s` at most: the owner calls `reap` on a timer. Times are an
argument, in seconds of any monotonic clock.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from libs.engine.kv.cache import KvCache
from libs.wire.errors import BatonError, Code


class LeaseExpired(BatonError):
    """The lease was reaped or released: its blocks may hold something else by now."""

    code = Code.KV_UNAVAILABLE
    retryable = True

    def __init__(self, lease_id: str) -> None:
        super().__init__(f"lease {lease_id} has ended")
        self.lease_id = lease_id


@dataclass(slots=True)
class _Lease:
    expires_s: float
    blocks: list[int] = field(default_factory=list)


class LeaseTable:
    """Open leases of one cache. Ids are 128 random bits: unguessable, never used again."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self._leases: dict[str, _Lease] = {}

    @property
    def count(self) -> int:
        return len(self._leases)

    @property
    def next_expiry_s(self) -> float | None:
        """When `reap` has work next; None without leases."""
        return min((lease.expires_s for lease in self._leases.values()), default=None)

    def is_live(self, lease_id: str) -> bool:
        return lease_id in self._leases

    def open(self, now_s: float, lease_s: float) -> str:
        """A new lease on no blocks yet, until `now_s + lease_s`. Raises ValueError unless that lies ahead."""
        expires_s = _expiry(now_s, lease_s)
        lease_id = secrets.token_hex(16)
        self._leases[lease_id] = _Lease(expires_s)
        return lease_id

    def add(self, lease_id: str, blocks: Iterable[int]) -> None:
        """Pins blocks that are used or cached. Raises LeaseExpired, or ValueError if one is free."""
        lease = self._get(lease_id)
        blocks = tuple(blocks)
        self._kv.ref(blocks)
        lease.blocks.extend(blocks)

    def renew(self, lease_id: str, now_s: float, lease_s: float) -> None:
        """Extends the lease to `now_s + lease_s`; never shortens it. Raises LeaseExpired."""
        lease = self._get(lease_id)
        lease.expires_s = max(lease.expires_s, _expiry(now_s, lease_s))

    def release(self, lease_id: str) -> bool:
        """Unpins the lease's blocks; False if it has ended already, which is no error."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        self._kv.unref(lease.blocks)
        return True

    def reap(self, now_s: float) -> list[str]:
        """Ends the leases that ran out; returns their ids."""
        ended = [lease_id for lease_id, lease in self._leases.items() if lease.expires_s <= now_s]
        for lease_id in ended:
            self.release(lease_id)
        return ended

    def _get(self, lease_id: str) -> _Lease:
        try:
            return self._leases[lease_id]
        except KeyError:
            raise LeaseExpired(lease_id) from None


def _expiry(now_s: float, lease_s: float) -> float:
    if not 0 < lease_s < math.inf:
        raise ValueError(f"lease_s={lease_s}: must be above 0 and finite")
    return now_s + lease_s
