"""Where an attempt goes: the coordinator's choice, or without one whichever worker of a queue group is free."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Final

from opentelemetry.context import Context

from libs.engine.kv.names import block_names, root_name
from libs.service.bus import Bus
from libs.wire import subjects
from libs.wire.errors import BatonError, Code, RequestRefused
from libs.wire.messages import Cached, Choice, Heartbeat, Placement, Role, Route, Source
from services.gateway.fleet import Fleet
from services.gateway.job import Job
from services.gateway.offload import Offload

ROUTE_TIMEOUT_S: Final = 0.25
NOTHING_CACHED: Final = Cached(tokens=0)


@dataclass(frozen=True, slots=True)
class Destination:
    """A subject, and the worker behind it; None: whoever of a queue group takes the message."""

    subject: str
    worker_id: str | None


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send one attempt. `prefill` None: the decode worker computes the prompt."""

    decode: Destination
    prefill: Destination | None
    decode_sources: tuple[Source, ...] = ()
    prefill_sources: tuple[Source, ...] = ()
    prefill_hit_blocks: int = 0
    store_blocks: int = 0
    expected: Cached = NOTHING_CACHED  # as the coordinator believes
    reason: str = ""
    score: float = 0.0
    alternatives: tuple[Choice, ...] = ()

    def without_prefill(self) -> Target:
        """The decode worker reads the prompt itself, and may pull what the prefill worker has of it."""
        if self.prefill is None:
            return self
        sources = self.decode_sources + self.prefill_sources
        if self.prefill.worker_id is not None and self.prefill_hit_blocks:
            sources += (Source(worker_id=self.prefill.worker_id, num_blocks=self.prefill_hit_blocks),)
        return replace(self, prefill=None, decode_sources=sources)


class Placer:
    """Names a prompt's blocks and asks the coordinator; knows what to do when there is none."""

    def __init__(self, bus: Bus, fleet: Fleet, model_fingerprint: str, offload: Offload) -> None:
        self._bus = bus
        self._fleet = fleet
        self._fingerprint = model_fingerprint
        self._offload = offload

    async def place(self, job: Job, exclude: frozenset[str], context: Context) -> Target:
        """Raises RequestRefused (NO_WORKER) when no decode worker is left."""
        reference = self._fleet.reference
        if reference is None or not self._fleet.serving("decode", exclude):
            raise no_worker()
        names = await self._names(job, reference)
        route = Route(
            request_id=job.request_id,
            names=names,
            num_tokens=len(job.prompt),
            exclude=tuple(sorted(exclude)),
        )
        timeout_s = min(ROUTE_TIMEOUT_S, max(0.01, (job.deadline_ns - time.time_ns()) / 1e9))
        try:
            placement = await self._bus.request(
                subjects.ROUTE, route, Placement, timeout_s=timeout_s, context=context
            )
        except BatonError as error:
            return self._fallback(exclude, f"no placement ({error.code})")
        problem = self._problem(placement, exclude)
        if problem:
            return self._fallback(exclude, problem)
        return self._target(placement, exclude, reference.block_size)

    async def _names(self, job: Job, reference: Heartbeat) -> tuple[bytes, ...]:
        root = root_name(self._fingerprint, reference.layout, job.tenant)
        return await self._offload.run(
            lambda: block_names(root, job.prompt, reference.block_size), weight=len(job.prompt)
        )

    def _problem(self, placement: Placement, exclude: frozenset[str]) -> str:
        """Why a placement cannot be used; empty when it can."""
        if not self._may_use(placement.decode, exclude):
            return f"placed on {placement.decode}, which is silent, refused or just failed"
        return ""

    def _may_use(self, worker_id: str, exclude: frozenset[str]) -> bool:
        return (
            worker_id not in exclude and self._fleet.knows(worker_id) and not self._fleet.refusal(worker_id)
        )

    def _target(self, placement: Placement, exclude: frozenset[str], block_size: int) -> Target:
        prefill = placement.prefill
        if prefill is not None and not self._may_use(prefill, exclude):
            prefill = None
        hits, sources = placement.decode_hit_blocks, placement.decode_sources
        if prefill is not None:
            hits, sources = placement.prefill_hit_blocks, placement.prefill_sources
        hits = max([hits, placement.store_blocks, *(source.num_blocks for source in sources)])
        return Target(
            decode=_direct("decode", placement.decode),
            prefill=_direct("prefill", prefill) if prefill is not None else None,
            decode_sources=placement.decode_sources,
            prefill_sources=placement.prefill_sources,
            prefill_hit_blocks=placement.prefill_hit_blocks,
            store_blocks=placement.store_blocks,
            expected=Cached(tokens=hits * block_size, miss=placement.miss),
            reason=placement.reason,
            score=placement.score,
            alternatives=placement.alternatives,
        )

    def _fallback(self, exclude: frozenset[str], reason: str) -> Target:
        decode = self._any("decode", exclude)
        if decode is None:
            raise no_worker()
        return Target(
            decode=decode,
            prefill=self._any("prefill", exclude),
            reason=f"queue group: {reason}",
            expected=Cached(tokens=0, miss="no placement"),
        )

    def _any(self, role: Role, exclude: frozenset[str]) -> Destination | None:
        """A queue group cannot leave workers out: with some to avoid, the least loaded of the rest is named."""
        able = self._fleet.serving(role, exclude)
        if not able:
            return None
        if exclude or self._fleet.has_refused:
            return _direct(role, able[0].worker_id)
        return Destination(subjects.submit_any(role), None)


def no_worker() -> RequestRefused:
    return RequestRefused(
        Code.NO_WORKER, "no decode worker is serving; try again later", retryable=True, retry_after_s=1.0
    )


def _direct(role: Role, worker_id: str) -> Destination:
    return Destination(subjects.submit(role, worker_id), worker_id)
