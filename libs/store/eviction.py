"""Eviction policies by the names that settings and the command line use. How they compare: docs/adr."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from libs.store.cost import CostAware
from libs.store.lru import Lru
from libs.store.order import EvictionPolicy
from libs.store.s3fifo import S3Fifo

POLICIES: Final[Mapping[str, Callable[[], EvictionPolicy]]] = {
    "lru": Lru,
    "s3fifo": S3Fifo,
    "cost": CostAware,
}


def make_policy(name: str) -> EvictionPolicy:
    """A new policy without objects. Raises KeyError for a name that is not in POLICIES."""
    return POLICIES[name]()
