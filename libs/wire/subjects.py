"""NATS subjects, as functions. Worker and gateway ids hold no dots, blanks or wildcards (`check_id`)."""

from __future__ import annotations

import re
from typing import Final, Literal

from libs.wire.messages import Role

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")

ROUTE: Final = "baton.route"  # coordinators, queue group
STORE_OFFER: Final = "baton.store.offer"  # coordinators, queue group
STORE_LOCATE: Final = "baton.store.locate"  # coordinators, queue group
STORE_CHANGED: Final = "baton.store.changed"  # every coordinator
EXPLAIN: Final = "baton.explain"  # coordinators, queue group
DONE: Final = "baton.done"  # every coordinator
HEARTBEATS: Final = "baton.heartbeat.*.*"
BLOCK_EVENTS: Final = "baton.blocks.*"
ABORT_ALL: Final = "baton.abort"  # every worker: the placement is not known
STATUS: Final = "baton.status"  # every process answers


def check_id(value: str) -> str:
    """Returns `value` if it can stand in a subject. Raises ValueError if not."""
    if not _ID.match(value):
        raise ValueError(f"id {value!r} must be 1 to 64 of A-Z a-z 0-9 _ -")
    return value


def submit(role: Role, worker_id: str) -> str:
    """Generate or Prefill for one worker."""
    return f"baton.{role}.{worker_id}.submit"


def submit_any(role: Role) -> str:
    """Generate or Prefill for whichever worker of the queue group takes it: the way without a coordinator."""
    return f"baton.{role}.submit"


def abort(worker_id: str) -> str:
    return f"baton.worker.{worker_id}.abort"


def audit(role: Role | Literal["gateway"], instance_id: str) -> str:
    """What does this process still owe, or still wait for?"""
    return f"baton.{role}.{instance_id}.audit"


def offer(worker_id: str) -> str:
    """Offers and OfferFailed for the requests a worker owns."""
    return f"baton.worker.{worker_id}.offer"


def pin(worker_id: str) -> str:
    return f"baton.worker.{worker_id}.pin"


def release(worker_id: str) -> str:
    return f"baton.worker.{worker_id}.release"


def dump(worker_id: str) -> str:
    return f"baton.worker.{worker_id}.dump"


def outputs(gateway_id: str) -> str:
    """StepOutput for one gateway."""
    return f"baton.gateway.{gateway_id}.outputs"


def heartbeat(role: Role, worker_id: str) -> str:
    return f"baton.heartbeat.{role}.{worker_id}"


def block_events(worker_id: str) -> str:
    return f"baton.blocks.{worker_id}"
