"""The prefill worker: reads prompts. Pull what is known, compute the rest, offer it, sample one token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import msgspec
from opentelemetry.context import Context

from libs.engine.kv.leases import LeaseExpired
from libs.engine.kv.names import root_name
from libs.engine.sequence import Sequence
from libs.engine.step import StepEvent
from libs.service.bus import Incoming
from libs.service.logs import get_logger
from libs.wire import subjects
from libs.wire.errors import Code, RequestRefused
from libs.wire.messages import Accepted, Debt, Generate, Offer, OfferFailed, Prefill
from libs.worker.admit import check_time, fetch_and_submit, fetches
from libs.worker.attempts import Attempts, engine_id
from libs.worker.host import Host
from services.prefill.handoff import Handoff, Offers

log = get_logger()


@dataclass(slots=True)
class Job:
    """One prompt in this worker, from its acceptance until its last offer is made."""

    request: Prefill
    context: Context
    seq: Sequence
    handoff: Handoff
    waiting_since_ns: int
    task: asyncio.Task[None] | None = None
    started_ns: int = 0  # first scheduled; 0: still waiting


class PrefillWorker:
    """Implements `libs.worker.host.Worker`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._offers = Offers(host.leases, host.card.layout, host.pool_ref, host.settings.lease_s)
        self._attempts = Attempts()
        self._jobs: dict[str, Job] = {}
        self._handed_off: dict[str, Job] = {}  # offered in full; by lease, until that ends

    @property
    def num_requests(self) -> int:
        return len(self._jobs)

    async def start(self) -> None:
        bus, worker_id = self._host.bus, self._host.identity.worker_id
        await bus.subscribe(subjects.submit("prefill", worker_id), (Prefill,), self._submit)
        await bus.subscribe(subjects.submit_any("prefill"), (Prefill,), self._submit, queue="prefill")

    async def close(self) -> None:
        for job in list(self._jobs.values()):
            self._fail(job, Code.DRAINING, "the prefill worker stopped")

    async def _submit(self, request: Prefill, incoming: Incoming) -> Accepted:
        host = self._host
        host.refuse_if_draining()
        host.card.check_prompt(request.prompt)
        if self._attempts.is_void(request.request_id, request.attempt):
            raise RequestRefused(Code.ABORTED, "the request was aborted", retryable=False)
        host.check_room(len(request.prompt), len(self._jobs))
        check_time(host, request, self._waiting_tokens())
        if self._attempts.begin(request.request_id, request.attempt):
            job = self._job(request, incoming.context)
            self._jobs[job.seq.request_id] = job
            job.task = asyncio.create_task(self._admit(job), name=f"prefill {job.seq.request_id}")
        return Accepted(worker_id=host.identity.worker_id)

    def _waiting_tokens(self) -> int:
        """Of the prompts in hand, still to be computed."""
        return sum(job.seq.num_prompt_tokens - job.seq.num_computed for job in self._jobs.values())

    def _job(self, request: Prefill, context: Context) -> Job:
        card = self._host.card
        seq = Sequence(
            request_id=engine_id(request.request_id, request.attempt),
            root=root_name(card.fingerprint, card.layout.fingerprint, request.tenant),
            tokens=list(request.prompt),
            num_prompt_tokens=len(request.prompt),
            sampling=request.sampling,
            limits=msgspec.structs.replace(request.limits, max_tokens=1),
            deadline_ns=request.deadline_ns,
            tenant=request.tenant,
        )
        return Job(request, context, seq, Handoff(request.request_id, request.attempt), request.sent_ns)

    async def _admit(self, job: Job) -> None:
        """Fetching interrupts the wait; the engine ends it."""
        is_fetched = fetches(self._host, job.request)
        if is_fetched:
            self._waited(job, time.time_ns())
        try:
            resumed_ns = await fetch_and_submit(self._host, job.seq, job.request, job.context)
            if is_fetched:
                job.waiting_since_ns = resumed_ns
        except RequestRefused as error:
            self._fail(job, error.code, error.message)
        except Exception as error:  # nobody else waits for this task
            log.exception("prefill failed", request_id=job.request.request_id)
            self._host.kv.release(job.seq)
            self._fail(job, Code.INTERNAL, f"{type(error).__name__}: {error}")

    def on_step(self, events: list[StepEvent]) -> None:
        for event in events:
            job = self._jobs.get(event.seq.request_id)
            if job is not None:
                self._advance(job, event)

    def _advance(self, job: Job, event: StepEvent) -> None:
        if not job.started_ns:
            job.started_ns = event.started_ns
            self._waited(job, event.started_ns)
        if event.error is not None:
            self._fail(job, event.error.code, event.error.message)
        else:
            try:
                self._offer(job, event)
            except LeaseExpired as error:  # a chunk took longer than the lease lasts
                self._fail(job, error.code, error.message)

    def _offer(self, job: Job, event: StepEvent) -> None:
        if event.tokens:
            offer = self._offers.final(job.handoff, job.seq, event.tokens[0], event.ended_ns)
            self._publish(job, offer)
            self._finish(job, event.ended_ns)
        elif progress := self._offers.progress(job.handoff, job.seq):
            self._publish(job, progress)

    def _finish(self, job: Job, ended_ns: int) -> None:
        attributes = {
            "baton.prompt_tokens": job.seq.num_prompt_tokens,
            "baton.cached_tokens": job.seq.num_cached,
            "baton.cached_from_peer": job.seq.num_from_peer,
            "baton.cached_from_store": job.seq.num_from_store,
        }
        start_ns = job.started_ns
        self._host.telemetry.record("prefill.compute", start_ns, ended_ns, job.context, attributes)
        del self._jobs[job.seq.request_id]
        self._forget_closed_leases()
        self._handed_off[job.handoff.lease_id] = job

    def _fail(self, job: Job, code: Code, message: str) -> None:
        """Tells the decode worker that no more will come: it computes what it lacks."""
        self._drop(job)
        request = job.request
        failed = OfferFailed(
            request_id=request.request_id, attempt=request.attempt, code=code, message=message
        )
        self._publish(job, failed)
        log.warning("prefill failed", request_id=request.request_id, code=code, error=message)

    def abort(self, request_id: str, attempt: int) -> None:
        """Gives back what this attempt and older ones of the request hold here. Idempotent."""
        self._attempts.abort(request_id, attempt)
        for job in [job for job in self._jobs.values() if job.request.request_id == request_id]:
            if job.request.attempt <= attempt:
                self._drop(job)
        for lease_id, job in list(self._handed_off.items()):
            if job.request.request_id == request_id and job.request.attempt <= attempt:
                self._offers.withdraw(job.handoff)
                del self._handed_off[lease_id]

    def requests(self) -> list[Generate | Prefill]:
        return [job.request for job in self._jobs.values()]

    def debt(self, request_id: str, attempt: int) -> Debt:
        """An offer, until the last one is made."""
        return Debt(owed=engine_id(request_id, attempt) in self._jobs)

    def leases_expired(self, lease_ids: list[str]) -> None:
        """Blocks that the decode worker did not fetch: perhaps it never heard of them, and waits."""
        for lease_id in lease_ids:
            job = self._handed_off.pop(lease_id, None)
            if job is not None:
                self._fail(job, Code.KV_UNAVAILABLE, "the lease on the prompt's blocks ran out")

    def _drop(self, job: Job) -> None:
        self._jobs.pop(job.seq.request_id, None)
        self._offers.withdraw(job.handoff)
        if job.task is not None and not job.task.done():
            job.task.cancel()  # while pulling: gives its blocks back by itself
        self._host.engine.abort(job.seq.request_id)

    def _forget_closed_leases(self) -> None:
        live = self._host.leases.is_live
        self._handed_off = {lease_id: job for lease_id, job in self._handed_off.items() if live(lease_id)}

    def _publish(self, job: Job, offer: Offer | OfferFailed) -> None:
        self._host.outbox.put(subjects.offer(job.request.decode_worker), offer, job.context)

    def _waited(self, job: Job, until_ns: int) -> None:
        attributes = {"baton.attempt": job.request.attempt}
        since_ns = job.waiting_since_ns
        self._host.telemetry.record("prefill.queue", since_ns, until_ns, job.context, attributes)
