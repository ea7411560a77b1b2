"""What a worker needs to write to the durable store and to read from it."""

from __future__ import annotations

from dataclasses import dataclass

from libs.engine.kv.cache import KvCache
from libs.engine.kv.pool import KvPool
from libs.service.bus import Bus
from libs.service.outbox import Outbox
from libs.store.interface import Store
from libs.store.objects import ObjectFormat


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """One worker's. `objects`: the format of its model and layout."""

    worker_id: str
    kv: KvCache
    pool: KvPool
    store: Store
    objects: ObjectFormat
    bus: Bus
    outbox: Outbox
