"""The decode worker: owns a request from its first token to its end.

Its prompt comes from a prefill worker (`remote_prefill`), or it computes it itself; when a handoff fails, too.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from opentelemetry.context import Context

from libs.engine.kv.names import root_name
from libs.engine.sequence import Sequence
from libs.engine.step import StepEvent
from libs.service.bus import Incoming
from libs.service.logs import get_logger
from libs.wire import subjects
from libs.wire.errors import Code, RequestRefused
from libs.wire.messages import (
    Accepted,
    Debt,
    FinishReason,
    FirstToken,
    Generate,
    Offer,
    OfferFailed,
    Prefill,
    Release,
)
from libs.worker.admit import check_time, fetch_and_submit, fetches
from libs.worker.attempts import Attempts, engine_id
from libs.worker.host import Host
from libs.worker.pace import refuse_if_late
from services.decode.handoff import HandoffFailed, Intake
from services.decode.spans import Spans
from services.decode.stream import Stream, Streams

log = get_logger()


@dataclass(slots=True)
class Job:
    """One request in this worker, from its acceptance to its end."""

    request: Generate
    context: Context
    seq: Sequence
    stream: Stream
    spans: Spans
    intake: Intake = field(default_factory=Intake)
    first: FirstToken | None = None  # came from prefill
    task: asyncio.Task[None] | None = None


class DecodeWorker:
    """Implements `libs.worker.host.Worker`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._streams = Streams(host.outbox, host.identity.worker_id)
        self._attempts = Attempts()
        self._jobs: dict[str, Job] = {}

    @property
    def num_requests(self) -> int:
        return len(self._jobs)

    async def start(self) -> None:
        bus, worker_id = self._host.bus, self._host.identity.worker_id
        await bus.subscribe(subjects.offer(worker_id), (Offer, OfferFailed), self._offer)
        await bus.subscribe(subjects.submit("decode", worker_id), (Generate,), self._submit)
        await bus.subscribe(subjects.submit_any("decode"), (Generate,), self._submit, queue="decode")

    async def close(self) -> None:
        for job in list(self._jobs.values()):
            self._fail(job, Code.DRAINING, "the decode worker stopped", retryable=True)
        self._streams.flush()

    async def _submit(self, request: Generate, incoming: Incoming) -> Accepted:
        host = self._host
        host.refuse_if_draining()
        host.card.check_prompt(request.prompt)
        _check_emitted(request)
        if self._attempts.is_void(request.request_id, request.attempt):
            raise RequestRefused(Code.ABORTED, "the request was aborted", retryable=False)
        host.check_room(len(request.prompt), len(self._jobs))
        if not request.num_emitted:  # a client that has half of its answer waits for the rest
            self._check_time(request)
        if self._attempts.begin(request.request_id, request.attempt):
            job = self._job(request, incoming.context)
            self._jobs[job.seq.request_id] = job
            job.task = asyncio.create_task(self._begin(job), name=f"request {job.seq.request_id}")
        return Accepted(worker_id=host.identity.worker_id)

    def _check_time(self, request: Generate) -> None:
        """Raises RequestRefused if the answer would come too late. A prefill worker judges its own part."""
        host = self._host
        turn_s, answer_s = host.pace.turn_s(len(self._jobs)), host.pace.answer_s(request.limits.max_tokens)
        if request.remote_prefill:
            refuse_if_late(host.identity.worker_id, turn_s, answer_s, request.deadline_ns)
            return
        own = (job for job in self._jobs.values() if not job.request.remote_prefill)
        waiting = sum(max(0, job.seq.num_prompt_tokens - job.seq.num_computed) for job in own)
        check_time(host, request, waiting, turn_s, answer_s)

    def _job(self, request: Generate, context: Context) -> Job:
        card = self._host.card
        seq = Sequence(
            request_id=engine_id(request.request_id, request.attempt),
            root=root_name(card.fingerprint, card.layout.fingerprint, request.tenant),
            tokens=list(request.prompt),
            num_prompt_tokens=len(request.prompt) - request.num_emitted,
            sampling=request.sampling,
            limits=request.limits,
            deadline_ns=request.deadline_ns,
            tenant=request.tenant,
        )
        stream = Stream(
            request.request_id, request.attempt, request.gateway_id, context, num_sent=request.num_emitted
        )
        return Job(request, context, seq, stream, Spans(self._host.telemetry, context, request))

    async def _offer(self, offer: Offer | OfferFailed, incoming: Incoming) -> None:
        """An offer that nobody waits for (any more) is given back at once."""
        job = self._jobs.get(engine_id(offer.request_id, offer.attempt))
        wanted = job is not None and job.intake.put(offer)
        if not wanted and isinstance(offer, Offer):
            release = Release(lease_id=offer.lease_id)
            self._host.outbox.put(subjects.release(offer.pool.worker_id), release)
        elif job is not None and isinstance(offer, Offer) and offer.first is not None:
            self._first(job, offer.first)

    def _first(self, job: Job, first: FirstToken) -> None:
        """The first token is sent at once: it does not wait for the blocks that the next one needs."""
        if job.first is not None:  # the offer came twice
            return
        now_ns = time.time_ns()
        job.first, job.seq.cached = first, first.cached
        reason = job.seq.append(first.token.id)
        self._streams.tokens(job.stream, (first.token,), first.cached)
        if reason is None:
            self._streams.flush()
        job.spans.first_token(first.computed_ns, now_ns, time.time_ns())
        if reason is not None:  # it was the last one, too: no blocks, not a single decode step
            self._finish(job, reason, now_ns)
            self._streams.flush()
            if job.task is not None:
                job.task.cancel()

    async def _begin(self, job: Job) -> None:
        """Until the engine has it. Whatever goes wrong, the gateway is told: nobody else waits for this task."""
        try:
            await (self._take_over(job) if job.request.remote_prefill else self._compute(job))
        except Exception as error:
            log.exception("request failed", request_id=job.request.request_id)
            self._host.kv.release(job.seq)
            self._fail(job, Code.INTERNAL, f"{type(error).__name__}: {error}", retryable=True)
            self._streams.flush()

    async def _take_over(self, job: Job) -> None:
        """Remote prefill: pull the prompt's blocks while they are made, then go on after the first token."""
        try:
            pulled_tokens = await job.intake.take_over(self._host, job.seq, job.context)
        except HandoffFailed as error:
            log.warning("handoff failed, computing", request_id=job.request.request_id, error=error.message)
            job.spans.handoff_failed(error.message, time.time_ns())
            await self._compute(job)
            return
        if job.first is not None:
            job.seq.cached = job.first.cached  # prefill's hits; not those of this pool, which a copy saved
        job.spans.taken_over(time.time_ns(), pulled_tokens)
        self._submit_to_engine(job)

    def _submit_to_engine(self, job: Job) -> None:
        try:
            self._host.engine.submit(job.seq)
        except RequestRefused as error:
            self._host.kv.release(job.seq)
            self._fail(job, error.code, error.message, retryable=error.retryable)

    async def _compute(self, job: Job) -> None:
        """No prefill worker, or a failed handoff: the prompt is computed here, from whatever is known of it."""
        is_fetched = fetches(self._host, job.request)
        if is_fetched:
            job.spans.waited(time.time_ns())
        try:
            resumed_ns = await fetch_and_submit(self._host, job.seq, job.request, job.context)
            if is_fetched:
                job.spans.waits_from(resumed_ns)
        except RequestRefused as error:
            self._fail(job, error.code, error.message, retryable=error.retryable)
            self._streams.flush()

    def on_step(self, events: list[StepEvent]) -> None:
        for event in events:
            job = self._jobs.get(event.seq.request_id)
            if job is not None:
                self._advance(job, event)
        self._streams.flush()

    def _advance(self, job: Job, event: StepEvent) -> None:
        job.spans.step(event.started_ns, event.ended_ns, job.seq, drew=bool(event.tokens))
        if event.tokens:
            self._streams.tokens(job.stream, event.tokens, job.seq.cached)
        if event.error is not None:
            error = event.error
            self._fail(job, error.code, error.message, retryable=error.retryable)
        elif event.reason is not None:
            self._finish(job, event.reason, event.ended_ns)

    def _finish(self, job: Job, reason: FinishReason, now_ns: int) -> None:
        self._streams.finish(job.stream, reason, job.seq.cached)
        job.spans.end(now_ns, job.stream.num_sent, reason)
        self._jobs.pop(job.seq.request_id, None)

    def _fail(self, job: Job, code: Code, message: str, *, retryable: bool) -> None:
        self._streams.fail(job.stream, code, message, retryable=retryable)
        self._drop(job, code)

    def abort(self, request_id: str, attempt: int) -> None:
        """Gives back what this attempt and older ones of the request hold here. Idempotent."""
        self._attempts.abort(request_id, attempt)
        for job in [job for job in self._jobs.values() if job.request.request_id == request_id]:
            if job.request.attempt <= attempt:
                self._drop(job, Code.ABORTED)

    def requests(self) -> list[Generate | Prefill]:
        return [job.request for job in self._jobs.values()]

    def debt(self, request_id: str, attempt: int) -> Debt:
        """An answer, until its end is sent."""
        job = self._jobs.get(engine_id(request_id, attempt))
        if job is None:
            return Debt(owed=False)
        return Debt(owed=True, num_sent=job.stream.num_sent, awaits_offer=job.intake.awaits_offer)

    def leases_expired(self, lease_ids: list[str]) -> None:
        """Leases here are pins of peers: what they did not fetch in time, they compute."""

    def _drop(self, job: Job, code: Code) -> None:
        self._jobs.pop(job.seq.request_id, None)
        if job.task is not None and job.task is not asyncio.current_task():
            job.task.cancel()  # while pulling: gives its blocks back by itself, once no thread writes to them
        self._host.engine.abort(job.seq.request_id)
        job.spans.end(time.time_ns(), job.stream.num_sent, code)


def _check_emitted(request: Generate) -> None:
    """Raises RequestRefused for a part of an answer that leaves nothing to continue."""
    if not 0 <= request.num_emitted < min(len(request.prompt), request.limits.max_tokens):
        text = f"num_emitted {request.num_emitted} of {len(request.prompt)} tokens, {request.limits.max_tokens} at most"
        raise RequestRefused(Code.BAD_REQUEST, text, retryable=False)
    if request.num_emitted and request.remote_prefill:
        raise RequestRefused(Code.BAD_REQUEST, "an answer is continued without prefill", retryable=False)
