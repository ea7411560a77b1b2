"""A gateway's parts, wired together: what listens to workers, and what answers clients."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from dataclasses import dataclass

from libs.service.bus import Bus, Incoming
from libs.service.config import Settings
from libs.service.footprint import footprint
from libs.service.logs import get_logger
from libs.service.outbox import Outbox
from libs.service.telemetry import Telemetry
from libs.text.model import TextModel
from libs.wire import subjects
from libs.wire.errors import Code
from libs.wire.messages import (
    Audit,
    Audited,
    Debt,
    Heartbeat,
    ServiceStatus,
    StatusRequest,
    StepOutput,
)
from services.gateway.access import Access
from services.gateway.admission import Admission
from services.gateway.answering import Answering, Served
from services.gateway.audit import Auditor
from services.gateway.counting import Counting
from services.gateway.dispatch import Dispatcher
from services.gateway.fleet import Fleet, loss_after_s
from services.gateway.metrics import Metrics
from services.gateway.offload import Offload
from services.gateway.parts import Parts
from services.gateway.placing import Placer
from services.gateway.prepare import Preparer

CLOSE_TIMEOUT_S = 1.0  # for requests that drain did not wait for to tell their clients, and for last messages
MEET_POLL_S = 0.02
log = get_logger()


@dataclass(frozen=True, slots=True)
class Model:
    """What the gateway knows of the model; the workers know the rest. `context_length` is in tokens."""

    name: str
    fingerprint: str
    context_length: int
    text: TextModel


class Gateway:
    """Started once, drained once. Everything belongs to the event loop's thread."""

    def __init__(
        self, gateway_id: str, settings: Settings, model: Model, bus: Bus, telemetry: Telemetry
    ) -> None:
        self.gateway_id = gateway_id
        self.settings = settings
        self.telemetry = telemetry
        self.metrics = Metrics()
        self.access = Access(settings.keys_file)
        self.admission = Admission(settings.max_inflight)
        self.address: str | None = None  # where it listens, once it does
        self._model = model
        self._bus = bus
        self._started_ns = time.time_ns()
        self._offload = Offload()
        self._outbox = Outbox(bus)
        self._dispatcher = Dispatcher(self.metrics.irregular)
        self._auditor = Auditor(bus, self._outbox, self._dispatcher)
        self.fleet = Fleet(
            model.fingerprint, loss_after_s(settings.heartbeat_s), self._dispatcher.worker_lost
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.served = Served(model.name, model.fingerprint, self._context_length)
        self._preparer = Preparer(model.text, self._offload, telemetry, settings.default_max_tokens)
        self.answering = self._answering()
        self.counting = Counting(model.text, self._preparer, self._offload, self.served)
        self.metrics.watch(
            lambda: self.admission.inflight,
            {"decode": lambda: self.fleet.count("decode"), "prefill": lambda: self.fleet.count("prefill")},
        )

    async def start(self) -> None:
        """Listens to workers. Raises BusError."""
        await self._bus.subscribe(subjects.outputs(self.gateway_id), (StepOutput,), self._on_outputs)
        await self._bus.subscribe(subjects.HEARTBEATS, (Heartbeat,), self._on_heartbeat)
        await self._bus.subscribe(subjects.audit("gateway", self.gateway_id), (Audit,), self._on_audit)
        await self._bus.subscribe(subjects.STATUS, (StatusRequest,), self._on_status)
        self._tasks = [
            asyncio.create_task(self._outbox.run(), name="outbox"),
            asyncio.create_task(self._check_fleet(), name="fleet check"),
            asyncio.create_task(self._auditor.run(), name="audit"),
        ]

    async def meet_workers(self) -> None:
        """Returns when a request could be served, or when every worker that lives must have been heard.

        A gateway that starts beside workers knows none of them, and must not tell clients that there are none.
        """
        until_s = time.monotonic() + loss_after_s(self.settings.heartbeat_s)
        while self.not_ready() and time.monotonic() < until_s:  # noqa: ASYNC110  heartbeats come, no event does
            await asyncio.sleep(MEET_POLL_S)

    async def run(self, stop: asyncio.Event) -> None:
        """Returns when told to stop. Raises what ended one of the gateway's own tasks: without them it would lie."""
        stopped = asyncio.create_task(stop.wait())  # no deadline: it serves as long as it is wanted
        try:
            await asyncio.wait([stopped, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done():
                    task.result()
                    raise RuntimeError(f"{task.get_name()} ended")
        finally:
            stopped.cancel()

    async def drain(self) -> None:
        """Refuses what is new and waits for what runs; at the deadline, what still runs is failed."""
        timeout_s = self.settings.drain_timeout_s
        log.info("draining", inflight=self.admission.inflight, timeout_s=timeout_s)
        if await self.admission.drain(timeout_s):
            return
        log.warning("drain deadline passed", inflight=self.admission.inflight)
        self._dispatcher.fail_all(Code.DRAINING, "the gateway is shutting down")
        await self.admission.drain(CLOSE_TIMEOUT_S)

    async def close(self) -> None:
        """Sends what is left to say, then stops listening. The bus stays its owner's."""
        if self._tasks:
            await self._outbox.flush(CLOSE_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._offload.close()

    @property
    def num_open(self) -> int:
        """Requests that workers may still send something for."""
        return len(self._dispatcher)

    def not_ready(self) -> list[str]:
        """Why no request can be served; empty when one can."""
        if self.admission.draining:
            return ["the gateway is shutting down"]
        if not self._bus.is_connected:
            return ["no connection to NATS"]
        return self.fleet.problems()

    def _answering(self) -> Answering:
        parts = Parts(
            gateway_id=self.gateway_id,
            bus=self._bus,
            outbox=self._outbox,
            telemetry=self.telemetry,
            metrics=self.metrics,
            text=self._model.text,
            fleet=self.fleet,
            dispatcher=self._dispatcher,
            placer=Placer(self._bus, self.fleet, self._model.fingerprint, self._offload),
            recovery_s=self.settings.recovery_s,
        )
        return Answering(
            parts,
            self.admission,
            self._preparer,
            self._offload,
            self.served,
            request_timeout_s=self.settings.request_timeout_s,
        )

    def _context_length(self) -> int:
        reference = self.fleet.reference
        own = self._model.context_length
        return own if reference is None else min(own, reference.context_length)

    async def _on_outputs(self, message: StepOutput, incoming: Incoming) -> None:
        self._dispatcher.deliver(message)

    async def _on_heartbeat(self, beat: Heartbeat, incoming: Incoming) -> None:
        self.fleet.hear(beat, time.monotonic())

    async def _on_audit(self, audit: Audit, incoming: Incoming) -> Audited:
        waits = self._dispatcher.is_waiting
        return Audited(debts=tuple(Debt(owed=waits(*attempt)) for attempt in audit.attempts))

    async def _on_status(self, request: StatusRequest, incoming: Incoming) -> ServiceStatus:
        reasons = self.not_ready()
        state = "draining" if self.admission.draining else "not ready" if reasons else "ready"
        return ServiceStatus(
            service="gateway",
            instance_id=self.gateway_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_ns=self._started_ns,
            state=state,
            model=self._model.name,
            address=self.address,
            inflight=self.admission.inflight,
            detail={**({"reason": "; ".join(reasons)} if reasons else {}), **footprint()},
        )

    async def _check_fleet(self) -> None:
        while True:
            self.fleet.check(time.monotonic())
            await asyncio.sleep(self.fleet.check_interval_s)
