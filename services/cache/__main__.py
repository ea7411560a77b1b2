"""`baton cache`: one coordinator."""

from __future__ import annotations

import asyncio
import gc
import os

from libs.placement.policy import LongestPrefix
from libs.service import logs, process
from libs.service.bus import Bus
from libs.service.config import Settings, instance_id, load
from libs.service.outbox import Outbox
from libs.store.capacity import capacity_bytes
from libs.store.eviction import make_policy
from libs.store.index import StoreIndex
from libs.store.open import open_store
from libs.wire import subjects
from libs.wire.errors import BusError
from services.cache.coordinator import Coordinator
from services.cache.misses import Misses
from services.cache.store_keeper import StoreKeeper
from services.cache.sync import nats_pages

FLUSH_S = 2.0
log = logs.get_logger(__name__)


def main(settings: Settings) -> int:
    """Runs until SIGTERM or SIGINT. Returns the exit status."""
    own_id = instance_id(settings, "cache")
    logs.configure("cache", own_id, settings)

    async def serve(stop: asyncio.Event) -> int:
        try:
            await _serve(own_id, settings, stop)
        except (BusError, ValueError) as error:  # what the user can mend
            log.error("cannot serve", error=str(error))
            return 1
        return 0

    process.run(serve)


async def _serve(own_id: str, settings: Settings, stop: asyncio.Event) -> None:
    async with await Bus.connect(settings.nats_url, own_id) as bus:
        outbox = Outbox(bus)
        sending = asyncio.create_task(outbox.run(), name="outbox")
        misses = Misses()
        store = await asyncio.to_thread(_open_keeper, own_id, settings, misses, outbox)
        policy = LongestPrefix(local_prefill_tokens=settings.local_prefill_tokens)
        coordinator = Coordinator(own_id, settings, policy, nats_pages(bus), misses=misses, store=store)
        try:
            await coordinator.serve(bus, stop, _freeze)
            await outbox.flush(FLUSH_S)
            await bus.drain()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


def _freeze() -> None:
    """The names and objects known by now stay, by the million: no garbage collection has to look at them again."""
    gc.collect()
    gc.freeze()


def _open_keeper(own_id: str, settings: Settings, misses: Misses, outbox: Outbox) -> StoreKeeper | None:
    """None where the settings want no store. Raises ValueError for a URL that names none."""
    if settings.store_url is None:
        return None
    store = open_store(settings.store_url)
    index = StoreIndex(
        make_policy(settings.store_policy),
        capacity_bytes=capacity_bytes(settings.store_url, settings.store_mib),
        ttl_s=settings.store_ttl_s,
        tenant_share=settings.store_tenant_share,
    )
    return StoreKeeper(
        own_id,
        store,
        index,
        misses,
        lambda news: outbox.put(subjects.STORE_CHANGED, news),
        rescan_s=settings.store_rescan_s,
    )


if __name__ == "__main__":
    raise SystemExit(main(load(os.environ)))
