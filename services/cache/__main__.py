"""`baton cache`: one coordinator."""

from __future__ import annotations

import asyncio
import os

from libs.placement.policy import LongestPrefix
from libs.service import logs, process
from libs.service.bus import Bus
from libs.service.config import Settings, instance_id, load
from libs.wire.errors import BusError
from services.cache.coordinator import Coordinator
from services.cache.sync import nats_pages

log = logs.get_logger(__name__)


def main(settings: Settings) -> int:
    """Runs until SIGTERM or SIGINT. Returns the exit status."""
    own_id = instance_id(settings, "cache")
    logs.configure("cache", own_id, settings)

    async def serve(stop: asyncio.Event) -> int:
        try:
            await _serve(own_id, settings, stop)
        except BusError as error:  # what the user can mend
            log.error("cannot serve", error=str(error))
            return 1
        return 0

    process.run(serve)


async def _serve(own_id: str, settings: Settings, stop: asyncio.Event) -> None:
    async with await Bus.connect(settings.nats_url, own_id) as bus:
        policy = LongestPrefix(local_prefill_tokens=settings.local_prefill_tokens)
        await Coordinator(own_id, settings, policy, nats_pages(bus)).serve(bus, stop)
        await bus.drain()


if __name__ == "__main__":
    raise SystemExit(main(load(os.environ)))
