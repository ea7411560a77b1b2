"""One attempt at a request: placed, accepted by a decode worker, then given to a prefill worker.

An attempt knows who may hold something of it, so that giving it up reaches everybody: a worker that did not
answer in time may still have accepted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
from opentelemetry.context import Context

from libs.service.logs import get_logger
from libs.wire import subjects
from libs.wire.errors import (
    BatonError,
    BusError,
    Code,
    MessageTooLarge,
    NoResponder,
    RequestRefused,
)
from libs.wire.messages import Accepted, Cached, Generate, OfferFailed, Prefill
from services.gateway.dispatch import Inbox
from services.gateway.job import Job
from services.gateway.parts import Parts
from services.gateway.placing import NOTHING_CACHED, Destination, Target

SUBMIT_TIMEOUT_S: Final = 2.0
log = get_logger()


@dataclass(slots=True)
class Attempt:
    """`number` counts from 1 and stands in every message; workers void an attempt and all before it.

    `emitted` is what earlier attempts have answered: this one goes on from there. `cause`: why there is another one.
    """

    parts: Parts
    job: Job
    number: int
    inbox: Inbox
    context: Context
    emitted: tuple[int, ...] = ()
    cause: str = ""
    expected: Cached = NOTHING_CACHED  # what the coordinator believes is cached
    _holders: list[str | None] = field(default_factory=list)  # who may hold it; None: nobody knows which

    def held_by(self) -> list[str]:
        """Subjects on which an Abort reaches whoever may hold this attempt."""
        if None in self._holders:
            return [subjects.ABORT_ALL]
        return [subjects.abort(worker_id) for worker_id in self._holders if worker_id]

    async def submit(self, exclude: frozenset[str], since_ns: int) -> None:
        """Returns once a decode worker owns the request. Raises BatonError; then `held_by` may still have names."""
        attributes: dict[str, str | int | float] = {"baton.attempt": self.number}
        if self.cause:
            attributes |= {"baton.retry.cause": self.cause, "baton.retry.tokens": len(self.emitted)}
        self.inbox.expect(self.number, None, None, len(self.emitted))
        sent_ns: int | None = None
        try:
            target = await self._place(exclude)
            hits = min(target.expected.tokens, len(self.job.prompt) - 1)
            self.expected = msgspec.structs.replace(target.expected, tokens=hits)
            attributes |= _placement(target)
            self.inbox.expect(
                self.number,
                target.decode.worker_id,
                target.prefill.worker_id if target.prefill else None,
                len(self.emitted),
            )
            sent_ns = await self._generate(target)
            if target.prefill is not None:
                sent_ns = await self._prefill(target, target.prefill)
        except BatonError as error:
            attributes["error.type"] = str(error.code)
            raise
        finally:
            # The workers' own spans begin where the message that they wait for was sent.
            end_ns = sent_ns if sent_ns is not None else time.time_ns()
            attributes["baton.decode.worker"] = self.inbox.decode or ""
            attributes["baton.prefill.worker"] = self.inbox.prefill or ""
            self.parts.telemetry.record("route", since_ns, max(end_ns, since_ns), self.context, attributes)

    async def _place(self, exclude: frozenset[str]) -> Target:
        if not self.emitted:
            return await self.parts.placer.place(self.job, exclude, self.context)
        longer = replace(self.job, prompt=self.job.prompt + self.emitted)
        return (await self.parts.placer.place(longer, exclude, self.context)).without_prefill()

    async def _generate(self, target: Target) -> int:
        job, sent_ns = self.job, time.time_ns()
        request = Generate(
            request_id=job.request_id,
            attempt=self.number,
            gateway_id=self.parts.gateway_id,
            tenant=job.tenant,
            prompt=job.prompt + self.emitted,
            num_emitted=len(self.emitted),
            sampling=job.sampling,
            limits=job.limits,
            remote_prefill=target.prefill is not None,
            sources=target.decode_sources,
            store_blocks=target.store_blocks,
            deadline_ns=job.deadline_ns,
            sent_ns=sent_ns,
        )
        worker_id = await self._ask(target.decode, request)
        self.inbox.decode = worker_id
        if refusal := self.parts.fleet.refusal(worker_id):
            raise RequestRefused(
                Code.MODEL_MISMATCH, f"{worker_id} must not be used: {refusal}", retryable=True
            )
        self.parts.fleet.watch(worker_id, time.monotonic())
        return sent_ns

    async def _prefill(self, target: Target, destination: Destination) -> int:
        """A prompt that no prefill worker is there for is computed by the decode worker, which is told so.

        Raises RequestRefused (OVERLOADED) where there is one, and it has too much to do.
        """
        job, sent_ns = self.job, time.time_ns()
        decode = self.inbox.decode
        assert decode is not None  # it has accepted
        request = Prefill(
            request_id=job.request_id,
            attempt=self.number,
            gateway_id=self.parts.gateway_id,
            tenant=job.tenant,
            prompt=job.prompt,
            sampling=job.sampling,
            limits=job.limits,
            decode_worker=decode,
            sources=target.prefill_sources,
            store_blocks=target.store_blocks,
            deadline_ns=job.deadline_ns,
            sent_ns=sent_ns,
        )
        try:
            self.inbox.prefill = await self._ask(destination, request)
            self.parts.fleet.watch(self.inbox.prefill, time.monotonic())
        except BatonError as error:
            if error.code is Code.OVERLOADED:  # decode would pay with the pace of the answers that it writes
                raise _overloaded(error) from None
            log.warning("no prefill worker; decode computes", code=error.code, error=error.message)
            failed = OfferFailed(
                request_id=job.request_id, attempt=self.number, code=error.code, message=error.message
            )
            self.parts.outbox.put(subjects.offer(decode), failed, self.context)
            return time.time_ns()
        return sent_ns

    async def _ask(self, destination: Destination, request: Generate | Prefill) -> str:
        """The worker that accepted. Until its answer is read, it counts as holding the attempt."""
        remaining_s = (self.job.deadline_ns - time.time_ns()) / 1e9
        timeout_s = max(0.01, min(SUBMIT_TIMEOUT_S, remaining_s))
        self._holders.append(destination.worker_id)
        try:
            accepted = await self.parts.bus.request(
                destination.subject, request, Accepted, timeout_s=timeout_s, context=self.context
            )
        except (RequestRefused, NoResponder, MessageTooLarge) as error:
            self._holders.pop()  # nothing was kept
            if isinstance(error, NoResponder) and destination.worker_id is not None:
                raise _lost(
                    destination, error
                ) from None  # it beats, or did: it is cut off, or was just killed
            raise
        except BusError as error:
            raise _lost(destination, error) from None
        self._holders[-1] = accepted.worker_id
        return accepted.worker_id


def _placement(target: Target) -> dict[str, str | int | float]:
    """For the trace: where to, at what cost, what else there was."""
    others = ", ".join(f"{other.worker_id} {other.score:.1f}" for other in target.alternatives)
    return {
        "baton.placement.reason": target.reason,
        "baton.placement.score": target.score,
        "baton.placement.alternatives": others,
        "baton.placement.cached_tokens": target.expected.tokens,
        "baton.placement.miss": target.expected.miss,
    }


def _lost(destination: Destination, error: BusError) -> RequestRefused:
    who = destination.worker_id or "a worker"
    return RequestRefused(
        Code.WORKER_LOST, f"{who} did not answer: {error.message}", retryable=True, retry_after_s=1.0
    )


def _overloaded(error: BatonError) -> RequestRefused:
    """For the client: the coordinator chose the worker with the least to do, so no other is tried."""
    retry_after_s = error.retry_after_s if isinstance(error, RequestRefused) else None
    return RequestRefused(Code.OVERLOADED, error.message, retryable=False, retry_after_s=retry_after_s)
