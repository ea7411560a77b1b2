"""A worker's process, of either role: from settings to serving, and back to nothing."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Final

from libs.checkpoint.errors import CheckpointError
from libs.checkpoint.open import open_checkpoint, resolve_model
from libs.engine.build import build_runner, choose_engine
from libs.engine.kv.pool import KvPool
from libs.service import logs, process
from libs.service.bus import Bus
from libs.service.config import Settings, instance_id
from libs.service.telemetry import Telemetry
from libs.wire.errors import BusError
from libs.wire.messages import Role
from libs.worker.capacity import kv_blocks
from libs.worker.card import card_of
from libs.worker.durable import open_durable_store
from libs.worker.host import Host, Worker
from libs.worker.report import Identity

_SWITCH_S: Final = (
    0.0005  # the engine's thread gets Python back from the event loop after this, not after 5 ms
)
EXIT_FAILED: Final = 1
EXIT_UNUSABLE: Final = 2  # a setting or a file is wrong: starting again changes nothing
log = logs.get_logger(__name__)


def run_worker(role: Role, settings: Settings, make: Callable[[Host], Worker]) -> int:
    """Runs one worker until it is told to stop. Returns the exit status."""
    identity = Identity(role, instance_id(settings, role), time.time_ns())
    logs.configure(role, identity.worker_id, settings)
    sys.setswitchinterval(_SWITCH_S)

    async def main(stop: asyncio.Event) -> int:
        try:
            await _serve(identity, settings, make, stop)
        except (CheckpointError, ValueError) as error:
            log.error("cannot serve", error=str(error))
            return EXIT_UNUSABLE
        except BusError as error:
            log.error("cannot serve", error=str(error))
            return EXIT_FAILED
        return 0

    return process.run(main)


async def _serve(
    identity: Identity, settings: Settings, make: Callable[[Host], Worker], stop: asyncio.Event
) -> None:
    async with await Bus.connect(settings.nats_url, identity.worker_id) as bus:
        telemetry = Telemetry.start(identity.role, identity.worker_id, settings)
        try:
            log.info("loading", model=settings.model, engine=settings.engine)
            host = await asyncio.to_thread(_build, identity, settings, bus, telemetry)
            await host.serve(make(host), stop)
            await bus.drain()
        finally:
            await asyncio.to_thread(telemetry.shutdown)


def _build(identity: Identity, settings: Settings, bus: Bus, telemetry: Telemetry) -> Host:
    checkpoint = open_checkpoint(resolve_model(settings.model))
    engine = choose_engine(settings)
    card = card_of(checkpoint, settings, engine.numerics)
    pool = KvPool(card.layout, kv_blocks(card.layout, settings.kv_cache_mib))
    runner = build_runner(checkpoint, pool, settings, engine)
    store = open_durable_store(settings)
    return Host(identity, settings, bus, telemetry, card, pool, runner, store)
