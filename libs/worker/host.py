"""What a prefill and a decode worker have in common: an engine, its pool, and the pool's place in the cluster.

    Host.start   connect, load the model, export the pool, answer peers, beat
    Host.serve   run until told to stop, then drain: no new work, finish the old, let peers pull, leave

A worker of either role gives the host its handlers (`Role`) and otherwise only uses its parts.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from libs.engine.engine import Engine
from libs.engine.kv.cache import KvCache
from libs.engine.kv.leases import LeaseTable
from libs.engine.kv.pool import KvPool
from libs.engine.plan import Runner
from libs.engine.scheduler import Scheduler, SchedulerConfig
from libs.engine.step import StepEvent
from libs.service.bus import Bus, Incoming
from libs.service.config import Settings
from libs.service.footprint import footprint
from libs.service.logs import get_logger
from libs.service.outbox import Outbox
from libs.service.telemetry import Telemetry
from libs.store.interface import Store
from libs.store.objects import ObjectFormat
from libs.transfer.links import Links
from libs.transfer.transports import allowed
from libs.wire import messages as wire
from libs.wire import subjects
from libs.wire.errors import Code, RequestRefused
from libs.worker.blocks import BlockFeed, Pins
from libs.worker.card import ModelCard
from libs.worker.durable import Durable
from libs.worker.exports import Exports
from libs.worker.orphans import Orphans
from libs.worker.pace import Pace
from libs.worker.prefault import Prefault
from libs.worker.pull import PrefixPuller
from libs.worker.report import Identity, Report, State
from libs.worker.store_access import StoreAccess
from libs.worker.store_loader import StoreLoader

EVENT_INTERVAL_S = 0.05
REAP_INTERVAL_S = 0.25
DRAIN_POLL_S = 0.02
STOP_TIMEOUT_S = 10.0  # for the step that runs
STORE_FLUSH_S = 5.0  # for blocks that wait to be written
log = get_logger()


class Worker(Protocol):
    """What a role adds to a host."""

    async def start(self) -> None:
        """Subscribes the role's own subjects."""
        ...

    def on_step(self, events: list[StepEvent]) -> None:
        """Called after every engine step, before finished sequences give their blocks back."""
        ...

    def abort(self, request_id: str, attempt: int) -> None: ...

    def requests(self) -> list[wire.Generate | wire.Prefill]:
        """Those in hand, of any gateway."""
        ...

    def debt(self, request_id: str, attempt: int) -> wire.Debt:
        """What is still to come of an attempt."""
        ...

    def leases_expired(self, lease_ids: list[str]) -> None:
        """Nobody released these in time."""
        ...

    @property
    def num_requests(self) -> int:
        """Requests this worker still owes an end."""
        ...

    async def close(self) -> None: ...


class Host:
    """The parts of one worker, wired together. Owned by the event loop's thread."""

    def __init__(
        self,
        identity: Identity,
        settings: Settings,
        bus: Bus,
        telemetry: Telemetry,
        card: ModelCard,
        pool: KvPool,
        runner: Runner,
        store: Store | None = None,
    ) -> None:
        self.identity = identity
        self.settings = settings
        self.bus = bus
        self.telemetry = telemetry
        self.card = card
        self.kv = KvCache(pool.num_blocks, card.layout.block_size)
        self.engine = Engine(self.kv, Scheduler(self.kv, _sizes(settings)), runner, self._on_step)
        self.leases = LeaseTable(self.kv)
        self.outbox = Outbox(bus)
        self.links = Links(pool, allowed(settings.transfers))
        self.room = asyncio.Lock()  # held while waiting for free blocks: first come, first served
        self.state: State = "serving"
        self._pool = pool
        self._prefault = Prefault(pool)
        self._exports = Exports(identity, settings, card, pool)
        self.pool_ref = self._exports.ref
        self.puller = PrefixPuller(
            self.kv,
            bus,
            self.outbox,
            self.links,
            card.layout.fingerprint,
            timeout_s=settings.pull_timeout_s,
            lease_s=settings.lease_s,
        )
        self.pace = Pace(settings.max_batch)
        self._durable = (
            None
            if store is None
            else Durable(self._store_access(store), compute_rate=lambda: self.pace.prompt_tokens_per_s)
        )
        self._report = Report(identity, settings, card, self.kv, self.engine.scheduler)
        self._feed = BlockFeed(self.kv, identity.worker_id, identity.epoch)
        self._pins = Pins(self.kv, self.leases, self.pool_ref)
        self._tasks: list[asyncio.Task[None]] = []
        self._worker: Worker | None = None

    def _store_access(self, store: Store) -> StoreAccess:
        objects = ObjectFormat(self.card.fingerprint, self.card.layout)
        who = self.identity.worker_id
        return StoreAccess(who, self.kv, self._pool, store, objects, self.bus, self.outbox)

    def _on_step(self, events: list[StepEvent]) -> None:
        assert self._worker is not None
        self.pace.step(events)
        self._worker.on_step(events)

    @property
    def loader(self) -> StoreLoader | None:
        """None: this worker has no store."""
        return None if self._durable is None else self._durable.loader

    async def serve(self, worker: Worker, stop: asyncio.Event) -> None:
        """Serves until `stop`, then drains within `drain_timeout_s` and leaves nothing behind."""
        try:
            await self._start(worker)
            await self._until_stopped(stop)
            await self._drain(worker)
        finally:
            await self._close(worker)

    async def _until_stopped(self, stop: asyncio.Event) -> None:
        """Returns when told to stop. Raises what ended one of the loops, the engine's among them."""
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopped, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        if self.engine.broken is not None:
            raise RuntimeError("the engine is broken") from self.engine.broken
        for task in self._tasks:
            if task.done():
                task.result()
                raise RuntimeError(f"{task.get_name()} ended")

    @property
    def is_serving(self) -> bool:
        """All subscriptions are made and the engine runs."""
        return bool(self._tasks) and self.state == "serving"

    def refuse_if_draining(self) -> None:
        """Raises RequestRefused once the worker is on its way out."""
        if self.state != "serving":
            text = f"{self.identity.worker_id} is draining"
            raise RequestRefused(Code.DRAINING, text, retryable=True, retry_after_s=1.0)

    def check_room(self, num_prompt_tokens: int, num_requests: int) -> None:
        """Raises RequestRefused if a worker with `num_requests` cannot take one more of this length."""
        scheduler = self.engine.scheduler
        scheduler.check(num_prompt_tokens + 1, num_held=num_requests - scheduler.num_sequences)

    def _detail(self) -> dict[str, str | int | float]:
        store = self._durable.detail() if self._durable is not None else {"store": "none"}
        return {
            "leases": self.leases.count,
            "layout": self.card.layout.fingerprint,
            "exports": " ".join(self.pool_ref.endpoints),
            "links": self.links.describe() or "none yet",
            **store,
            **footprint(),
        }

    async def _start(self, worker: Worker) -> None:
        who = self.identity
        self._worker = worker
        await self._exports.start()
        await self.bus.subscribe(subjects.pin(who.worker_id), (wire.Pin,), self._pins.pin)
        await self.bus.subscribe(subjects.release(who.worker_id), (wire.Release,), self._pins.release)
        await self.bus.subscribe(subjects.dump(who.worker_id), (wire.DumpRequest,), self._dump)

        async def status(message: wire.StatusRequest, incoming: Incoming) -> wire.ServiceStatus:
            return self._report.status(worker.num_requests, self.state, self._detail())

        async def abort(message: wire.Abort, incoming: Incoming) -> None:
            worker.abort(message.request_id, message.attempt)

        async def audit(message: wire.Audit, incoming: Incoming) -> wire.Audited:
            return wire.Audited(debts=tuple(worker.debt(*attempt) for attempt in message.attempts))

        await self.bus.subscribe(subjects.STATUS, (wire.StatusRequest,), status)
        await self.bus.subscribe(subjects.audit(who.role, who.worker_id), (wire.Audit,), audit)
        await self.bus.subscribe(subjects.abort(who.worker_id), (wire.Abort,), abort)
        await self.bus.subscribe(subjects.ABORT_ALL, (wire.Abort,), abort)
        await worker.start()
        loops = {
            "engine": self.engine.run(),
            "outbox": self.outbox.run(),
            "heartbeat": self._beat(worker),
            "block events": self._publish_events(),
            "lease reaper": self._reap(worker),
            "orphans": Orphans(self.bus, worker.requests, worker.abort).run(),
        }
        if self._durable is not None:
            loops["store writer"] = self._durable.writer.run()
        self._tasks = [asyncio.create_task(loop, name=name) for name, loop in loops.items()]
        log.info("serving", model=self.card.name, kv_blocks=self.kv.total, endpoints=self.pool_ref.endpoints)

    async def _drain(self, worker: Worker) -> None:
        """No new work; the old ends; peers finish pulling. In that order, all within one deadline."""
        self.state = "draining"
        self._heartbeat(worker)
        deadline_s = time.monotonic() + self.settings.drain_timeout_s
        log.info("draining", requests=worker.num_requests, leases=self.leases.count)
        # Two owners, one of them a table: there is no single event to wait for.
        while (worker.num_requests or self.leases.count) and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_S)
        if worker.num_requests or self.leases.count:
            log.warning("drain deadline passed", requests=worker.num_requests, leases=self.leases.count)

    async def _close(self, worker: Worker) -> None:
        self.state = "stopped"
        await worker.close()
        if self._tasks:
            await self.engine.stop(STOP_TIMEOUT_S)
            self._heartbeat(worker)
            if self._durable is not None:
                await self._durable.close(STORE_FLUSH_S)
            await self.outbox.flush(timeout_s=2.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._prefault.close)
        await self.links.close()
        await self._exports.close()
        self._pool.close()

    async def _beat(self, worker: Worker) -> None:
        while True:
            self._heartbeat(worker)
            await asyncio.sleep(self.settings.heartbeat_s)

    def _heartbeat(self, worker: Worker) -> None:
        who = self.identity
        beat = self._report.heartbeat(worker.num_requests, self.state)
        self.outbox.put(subjects.heartbeat(who.role, who.worker_id), beat)

    async def _publish_events(self) -> None:
        subject = subjects.block_events(self.identity.worker_id)
        while True:
            await asyncio.sleep(EVENT_INTERVAL_S)
            self._prefault.reach(self.kv.most_taken)
            for message in self._feed.take():
                self.outbox.put(subject, message)

    async def _reap(self, worker: Worker) -> None:
        """On a timer, not on new work: an idle worker gives expired leases back too."""
        while True:
            await asyncio.sleep(REAP_INTERVAL_S)
            await self.links.close_idle(time.monotonic())
            if expired := self.leases.reap(time.monotonic()):
                log.warning("leases expired", count=len(expired))
                worker.leases_expired(expired)

    async def _dump(self, request: wire.DumpRequest, incoming: Incoming) -> wire.Dump:
        return self._feed.dump(request)


def _sizes(settings: Settings) -> SchedulerConfig:
    return SchedulerConfig(
        max_rows=settings.max_batch, max_step_tokens=settings.max_step_tokens, max_queue=settings.max_queue
    )
