"""What a worker says of itself: heartbeats to everybody, a status to whoever asks."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Literal

from libs.engine.kv.cache import KvCache
from libs.engine.scheduler import Scheduler
from libs.service.config import Settings
from libs.wire import messages as wire
from libs.worker.card import ModelCard

State = Literal["serving", "draining", "stopped"]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a worker is, in this life of its process."""

    role: wire.Role
    worker_id: str
    epoch: int  # ns since 1970


@dataclass(frozen=True, slots=True)
class Report:
    """Reads the worker's parts; changes nothing. `num_requests`: those it still owes an end."""

    identity: Identity
    settings: Settings
    card: ModelCard
    kv: KvCache
    scheduler: Scheduler

    def heartbeat(self, num_requests: int, state: State) -> wire.Heartbeat:
        who, card = self.identity, self.card
        return wire.Heartbeat(
            worker_id=who.worker_id,
            role=who.role,
            epoch=who.epoch,
            model=card.name,
            model_fingerprint=card.fingerprint,
            layout=card.layout.fingerprint,
            context_length=card.context_length,
            block_size=card.layout.block_size,
            load=self._load(num_requests),
            state=state,
        )

    def status(
        self, num_requests: int, state: State, detail: dict[str, str | int | float]
    ) -> wire.ServiceStatus:
        return wire.ServiceStatus(
            service=self.identity.role,
            instance_id=self.identity.worker_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_ns=self.identity.epoch,
            state=state,
            model=self.card.name,
            load=self._load(num_requests),
            detail=detail,
        )

    def _load(self, num_requests: int) -> wire.Load:
        running = self.scheduler.num_running
        return wire.Load(
            waiting=max(num_requests - running, 0),
            running=running,
            blocks_free=self.kv.free,
            blocks_cached=self.kv.cached,
            blocks_total=self.kv.total,
            queue_limit=self.settings.max_queue,
        )
