"""What all requests of a gateway share, handed to each as one value."""

from __future__ import annotations

from dataclasses import dataclass

from libs.service.bus import Bus
from libs.service.outbox import Outbox
from libs.service.telemetry import Telemetry
from libs.text.model import TextModel
from services.gateway.dispatch import Dispatcher
from services.gateway.fleet import Fleet
from services.gateway.metrics import Metrics
from services.gateway.placing import Placer


@dataclass(frozen=True, slots=True)
class Parts:
    """Owned by `Gateway`."""

    gateway_id: str
    bus: Bus
    outbox: Outbox
    telemetry: Telemetry
    metrics: Metrics
    text: TextModel
    fleet: Fleet
    dispatcher: Dispatcher
    placer: Placer
    recovery_s: float  # how long a request waits for a worker to come back that it has lost
