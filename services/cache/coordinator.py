"""The coordinator: hears what workers hold and do, and answers where a prompt should go.

Everything it knows comes from heartbeats, block events and dumps, so it may be killed at any time: a new one knows
the same within a second or two, and until then gateways do without. Several may run side by side. They share the
queue group of Route and each hear all the rest, so their indexes agree; what another copy has placed is seen only
once it shows in a worker's heartbeat.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from libs.placement.index import BlockIndex
from libs.placement.load import InFlight
from libs.placement.policy import Policy
from libs.placement.view import Prompt, Worker
from libs.service.bus import Bus, Incoming
from libs.service.config import Settings
from libs.service.footprint import footprint
from libs.service.logs import get_logger
from libs.store.key import block_key
from libs.wire import subjects
from libs.wire.errors import Code, RequestRefused
from libs.wire.messages import (
    BlockEvents,
    Done,
    Heartbeat,
    Placement,
    Route,
    ServiceStatus,
    Source,
    StatusRequest,
)
from libs.wire.store_messages import (
    Explain,
    Explained,
)
from services.cache.fleet import Change, Fleet
from services.cache.misses import Misses
from services.cache.shares import shares_of
from services.cache.store_keeper import StoreKeeper
from services.cache.sync import Pages, Synchroniser

QUEUE_GROUP = "cache"
TICK_S = 0.2
SWEEP_NAMES = 10_000  # a few ms of work
SETTLE_TIMEOUT_S = 2.0  # for the first dumps to come in, before routes are taken

log = get_logger()


@dataclass(slots=True)
class Counters:
    """Since the process began."""

    routes: int = 0
    refused: int = 0
    lost_workers: int = 0
    expired_requests: int = 0


class Coordinator:
    """Index, fleet and load of one process, wired to the bus by `serve`."""

    def __init__(
        self,
        instance_id: str,
        settings: Settings,
        policy: Policy,
        fetch: Pages,
        clock: Callable[[], float] = time.monotonic,
        *,
        misses: Misses | None = None,
        store: StoreKeeper | None = None,
    ) -> None:
        loss_s = max(2.0, 4 * settings.heartbeat_s)
        self.instance_id = instance_id
        self.settings = settings
        self.index = BlockIndex()
        self.fleet = Fleet(loss_s)
        self.in_flight = InFlight(settle_s=loss_s, expire_s=settings.request_timeout_s + loss_s)
        self.sync = Synchroniser(self.index, fetch)
        self.counters = Counters()
        self.state = "starting"
        self.misses = misses or Misses()
        self.store = store
        self._policy = policy
        self._clock = clock
        self._last_tick_s = clock()
        self._was_cut_off = False
        self._started_ns = time.time_ns()

    async def serve(self, bus: Bus, stop: asyncio.Event, on_warm: Callable[[], None] = lambda: None) -> None:
        """Serves until `stop`; `on_warm` is called before the first route. Raises what ended one of its tasks.

        Whoever owns the bus drains it next: routes that are already on their way here still get their answer.
        """
        timer = asyncio.create_task(self._run_timer(bus), name="coordinator timer")
        keeper = asyncio.create_task(self._keep_store(), name="store keeper")
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            await self._listen(bus)
            await self._warm_up()
            if self.store is not None:
                await self.store.settle(SETTLE_TIMEOUT_S)
                await self.store.listen(bus, QUEUE_GROUP)
            await bus.subscribe(subjects.EXPLAIN, (Explain,), self.on_explain, queue=QUEUE_GROUP)
            await bus.subscribe(subjects.ROUTE, (Route,), self.on_route, queue=QUEUE_GROUP)
            on_warm()
            self.state = "serving"
            log.info("serving", workers=len(self.fleet), names=len(self.index))
            await asyncio.wait([timer, keeper, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in (timer, keeper):
                if task.done():
                    task.result()
            self.state = "draining"
        finally:
            for each in (timer, keeper, stopped):
                each.cancel()
            await self.sync.close()
            await asyncio.gather(timer, keeper, stopped, return_exceptions=True)

    async def on_route(self, route: Route, incoming: Incoming | None = None) -> Placement:
        """Raises RequestRefused(NO_WORKER) when no decode worker may take the prompt."""
        self.counters.routes += 1
        started_s = self._clock()
        runs = self.index.runs(route.names)
        in_store = self.store.use(route.names) if self.store is not None else 0
        prompt = Prompt(route.num_tokens, frozenset(route.exclude), in_store)
        workers = self._view(runs)
        placement = self._policy.place(prompt, workers)
        if placement is None:
            self.counters.refused += 1
            raise self._no_worker(route, workers)
        miss = self._miss(route.names, max([in_store, *runs.values()]))
        placement = msgspec.structs.replace(placement, miss=miss)
        self.in_flight.dispatch(route.request_id, shares_of(prompt, placement, workers), self._clock())
        log.debug(
            "placed",
            request_id=route.request_id,
            decode=placement.decode,
            prefill=placement.prefill,
            reason=placement.reason,
            score=placement.score,
            took_s=self._clock() - started_s,
        )
        return placement

    async def on_explain(self, request: Explain, incoming: Incoming | None = None) -> Explained:
        runs = self.index.runs(request.names)
        in_store = self.store.run_of(request.names) if self.store is not None else 0
        return Explained(
            workers=tuple(
                Source(worker_id=worker_id, num_blocks=count) for worker_id, count in sorted(runs.items())
            ),
            store_blocks=in_store,
            miss=self._miss(request.names, max([in_store, *runs.values()])),
        )

    async def on_done(self, done: Done, incoming: Incoming | None = None) -> None:
        self.in_flight.end(done.request_id, self._clock())

    async def on_events(self, events: BlockEvents, incoming: Incoming | None = None) -> None:
        self.sync.receive(events)
        gone = (block_key(event.name) for event in events.events if not event.stored)
        self.misses.note(gone, "evicted")

    async def on_heartbeat(self, heartbeat: Heartbeat, incoming: Incoming | None = None) -> None:
        worker_id = heartbeat.worker_id
        change = self.fleet.beat(heartbeat, self._clock())
        if change is Change.IGNORED:
            return
        if change is not Change.SAME:
            log.info("worker", worker_id=worker_id, change=change.value, role=heartbeat.role)
            self.in_flight.lose(worker_id)
        if change is Change.STOPPED:
            self.sync.leave(worker_id)
            return
        if change is not Change.SAME:
            self.sync.join(worker_id, heartbeat.epoch)
            self._warn_of_strays()
        self.in_flight.report(worker_id, heartbeat.load, self._clock())

    async def on_status(self, request: StatusRequest, incoming: Incoming | None = None) -> ServiceStatus:
        return ServiceStatus(
            service="cache",
            instance_id=self.instance_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_ns=self._started_ns,
            state=self.state,
            model=next((heartbeat.model for heartbeat in self.fleet.usable()), None),
            inflight=self.in_flight.num_requests,
            detail={**self._detail(), **footprint()},
        )

    def tick(self, *, connected: bool) -> None:
        """What time brings about: lost workers, expired requests, a piece of the index swept."""
        now_s = self._clock()
        was_deaf = now_s - self._last_tick_s > self.fleet.loss_s / 2  # stopped, or starved of CPU
        self._last_tick_s = now_s
        if was_deaf or not connected:
            self.fleet.forgive(now_s)
        if connected and self._was_cut_off:
            self.sync.doubt_all()
        self._was_cut_off = not connected
        for worker_id in self.fleet.take_lost(now_s):
            log.warning("worker lost", worker_id=worker_id, silent_s=self.fleet.loss_s)
            self.counters.lost_workers += 1
            self.in_flight.lose(worker_id)
            self.sync.leave(worker_id)
        self.counters.expired_requests += self.in_flight.expire(now_s)
        self.index.sweep(SWEEP_NAMES)

    async def _listen(self, bus: Bus) -> None:
        await bus.subscribe(subjects.STATUS, (StatusRequest,), self.on_status)
        await bus.subscribe(subjects.DONE, (Done,), self.on_done)
        await bus.subscribe(
            subjects.BLOCK_EVENTS,
            (BlockEvents,),
            self.on_events,
            on_dropped=lambda dropped: self.sync.doubt_all(),
        )
        await bus.subscribe(subjects.HEARTBEATS, (Heartbeat,), self.on_heartbeat)

    async def _keep_store(self) -> None:
        if self.store is None:
            await asyncio.Event().wait()  # nothing to keep, and nothing that could end
        else:
            await self.store.run()

    async def _warm_up(self) -> None:
        """Hears every worker once and reads what it holds, before it takes routes: gateways do without so long.

        A coordinator that answered earlier would say that there are no workers, or spoil the hits.
        """
        await asyncio.sleep(1.5 * self.settings.heartbeat_s)
        await self.sync.settle(SETTLE_TIMEOUT_S)

    async def _run_timer(self, bus: Bus) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick(connected=bus.is_connected)

    def _miss(self, names: Sequence[bytes], held: int) -> str:
        """Why the first block that nobody holds is missing."""
        return self.misses.why(names[held]) if held < len(names) else ""

    def _view(self, runs: Mapping[str, int]) -> list[Worker]:
        return [
            self._worker(heartbeat, runs.get(heartbeat.worker_id, 0)) for heartbeat in self.fleet.usable()
        ]

    def _worker(self, heartbeat: Heartbeat, hit_blocks: int) -> Worker:
        standing = self.in_flight.of(heartbeat.worker_id)
        load = heartbeat.load
        return Worker(
            worker_id=heartbeat.worker_id,
            role=heartbeat.role,
            block_size=heartbeat.block_size,
            hit_blocks=hit_blocks,
            requests=standing.requests,
            queued_tokens=standing.queued_tokens,
            blocks_used=standing.blocks_used,
            blocks_total=load.blocks_total,
            saturated=load.waiting >= load.queue_limit,
            draining=heartbeat.state != "serving",
            last_chosen=standing.last_chosen,
        )

    def _no_worker(self, route: Route, workers: list[Worker]) -> RequestRefused:
        decoders = [worker for worker in workers if worker.role == "decode"]
        draining = sum(worker.draining for worker in decoders)
        excluded = sum(worker.worker_id in route.exclude for worker in decoders)
        text = (
            f"no decode worker can take the request: {len(decoders)} known, {draining} draining, "
            f"{excluded} excluded after failing it"
        )
        return RequestRefused(Code.NO_WORKER, text, retryable=True, retry_after_s=1.0)

    def _warn_of_strays(self) -> None:
        if strays := self.fleet.strays():
            log.warning("workers of another model or layout get no work", workers=_name_strays(strays))

    def _detail(self) -> dict[str, str | int | float]:
        roles = [heartbeat.role for heartbeat in self.fleet]
        detail: dict[str, str | int | float] = {
            "prefill_workers": roles.count("prefill"),
            "decode_workers": roles.count("decode"),
            "workers_in_sync": self.sync.num_in_sync,
            "names": len(self.index),
            "routes": self.counters.routes,
            "refused": self.counters.refused,
            "lost_workers": self.counters.lost_workers,
            "expired_requests": self.counters.expired_requests,
            "event_gaps": self.sync.num_gaps,
            "dumps": self.sync.num_dumps,
        }
        detail |= self.store.detail() if self.store is not None else {"store": "none"}
        if strays := self.fleet.strays():
            detail["mismatch"] = _name_strays(strays)
        return detail


def _name_strays(strays: list[Heartbeat]) -> str:
    named = (
        f"{stray.worker_id} (model {stray.model_fingerprint[:12]}, layout {stray.layout}, "
        f"blocks of {stray.block_size})"
        for stray in strays
    )
    return ", ".join(named)
