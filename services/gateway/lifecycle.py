"""One request between the gateway and the workers, from its placement to its end.

    start   place, submit to decode, then to prefill          raises when no worker takes it
    read    what has arrived, as text                         a lost worker's answer is continued by another
    close   abort what still runs, tell the coordinator       always, whatever happened

Every failure is a BatonError. Nothing here waits past the request's deadline.
"""

from __future__ import annotations

import time
from typing import Final

import msgspec
from opentelemetry.context import Context

from libs.service.logs import get_logger
from libs.wire import subjects
from libs.wire.errors import BatonError, Code, RequestRefused
from libs.wire.messages import (
    Abort,
    Cached,
    Delta,
    Done,
    Failed,
    Finished,
    FinishReason,
    Message,
    OfferFailed,
    Token,
)
from services.gateway.attempt import Attempt
from services.gateway.dispatch import Item, WorkerLost
from services.gateway.job import Job, Outcome
from services.gateway.parts import Parts
from services.gateway.recovery import Recovery
from services.gateway.transcript import Piece, Transcript

TOKEN_SILENCE_S: Final = 120.0  # between two tokens, of a worker that lives and owes them
log = get_logger()


class Life:
    """Opened by whoever answers the client, who closes it. Used by one task at a time."""

    def __init__(self, parts: Parts, job: Job, context: Context) -> None:
        self._parts = parts
        self._job = job
        self._context = context
        self._inbox = parts.dispatcher.open(job.request_id, job.limits.max_tokens)
        self._transcript = Transcript(
            parts.text, job.stops, job.limits.stop_token_ids, logprobs=job.sampling.logprobs
        )
        self._recovery = Recovery(parts.fleet, parts.recovery_s)
        self._emitted: list[int] = []  # the answer so far
        self._attempt: Attempt | None = None
        self._failure: BatonError | None = None  # to be raised by the next read
        self._finished: Finished | None = None
        self._cached: Cached | None = None
        self._last_token_ns = 0
        self._sent_ns: int | None = None  # when the first token left its worker
        self._routed = False
        self._closed = False
        self._outcome: Outcome | None = None
        self.num_attempts = 0
        self.first_text_ns: int | None = None  # ns since 1970, when the first text could be shown
        self.last_text_ns: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self._transcript.num_tokens

    def outcome(self) -> Outcome | None:
        """None until the answer is complete."""
        return self._outcome

    @property
    def workers(self) -> tuple[str | None, str | None]:
        """Decode and prefill worker of the last attempt."""
        return (self._inbox.decode, self._inbox.prefill)

    async def start(self, since_ns: int) -> None:
        """Returns when a worker owns the request; `since_ns` is where its `route` span begins.

        Raises BatonError when none takes it within the attempts, or within the deadline.
        """
        await self._place(since_ns, None)

    async def read(self, wait_s: float) -> Piece | None:
        """The next text, or None when there is none within `wait_s`. With the last, `outcome()` is there.

        Raises BatonError when the request has failed; what had arrived before was returned before.
        """
        if self._failure is None:
            tokens = self._sort(await self._inbox.take(max(0.0, min(wait_s, self._remaining_s))))
            if self._failure is None and self._finished is None:
                self._failure = self._overdue()
            if tokens or self._failure is None:
                return self._reveal(tokens)
        failure, self._failure = self._failure, None
        await self._retry(failure)
        return self._reveal([])

    def close(self) -> None:
        """Ends the request on all sides. Synchronous, so that a cancelled handler can rely on it; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._parts.dispatcher.close(self._job.request_id)
        if self._finished is None:
            self._abort()
        if self._routed:
            self._send(subjects.DONE, Done(request_id=self._job.request_id))

    @property
    def _remaining_s(self) -> float:
        return (self._job.deadline_ns - time.time_ns()) / 1e9

    def _is_late(self) -> bool:
        return self._remaining_s <= 0

    async def _place(self, since_ns: int, earlier: BatonError | None) -> None:
        """Tries until a worker accepts. `earlier` is what a client is told when nobody is left to try."""
        while True:
            if self._remaining_s <= 0:
                raise self._too_late()
            self.num_attempts += 1
            self._routed = True
            self._attempt = attempt = Attempt(
                self._parts,
                self._job,
                self.num_attempts,
                self._inbox,
                self._context,
                emitted=tuple(self._emitted),
                cause=earlier.message if earlier is not None else "",
            )
            try:
                await attempt.submit(self._recovery.exclude, since_ns)
                return
            except BatonError as error:
                if error.code is Code.NO_WORKER and self._inbox.decode is None:
                    if earlier is None or not await self._recovery.worker_returns(earlier, self._is_late):
                        raise earlier or error from None  # nobody is left to try
                elif error.code is Code.WORKER_LOST:
                    self._not_taken(error)
                    earlier = earlier or error
                else:
                    self._give_up(error)
                    earlier = error
                since_ns = time.time_ns()

    async def _retry(self, failure: BatonError) -> None:
        """The answer so far stands: the next worker goes on from it."""
        if reason := self._end_by_tokens():
            self._abort()
            self._finished = Finished(
                request_id=self._job.request_id,
                attempt=self.num_attempts,
                reason=reason,
                num_tokens=len(self._emitted),
                cached=self._cached or Cached(tokens=0),
            )
            return
        self._give_up(failure)
        await self._place(time.time_ns(), failure)

    def _end_by_tokens(self) -> FinishReason | None:
        """How the answer has ended, if the tokens that came say so: then only the word of its end was lost."""
        limits = self._job.limits
        if not self._emitted:
            return None
        if self._emitted[-1] in limits.stop_token_ids and not limits.ignore_eos:
            return "stop"
        return "length" if len(self._emitted) >= limits.max_tokens else None

    def _not_taken(self, failure: BatonError) -> None:
        """The worker never said that it has the request. That says nothing against the request: it does not count."""
        self._abort()
        decode, _ = self.workers
        self._recovery.unreachable(decode)
        log.info("trying another", attempt=self.num_attempts, decode=decode, error=failure.message)
        self._parts.metrics.retried(failure.code)

    def _give_up(self, failure: BatonError) -> None:
        """Ends the attempt. Raises `failure` when there must be no other one."""
        self._abort()
        decode, _ = self.workers
        if not self._recovery.may_retry(failure, decode):
            raise failure
        log.info(
            "trying again",
            attempt=self.num_attempts,
            decode=decode,
            tokens=len(self._emitted),
            error=failure.message,
        )
        self._parts.metrics.retried(failure.code)

    def _abort(self) -> None:
        if self._attempt is None:
            return
        abort = Abort(request_id=self._job.request_id, attempt=self._attempt.number)
        for subject in self._attempt.held_by():
            self._send(subject, abort)
        self._attempt = None

    def _sort(self, items: list[Item]) -> list[Token]:
        """Tokens of the items; their end is kept in `_finished` or `_failure`."""
        tokens: list[Token] = []
        for item in items:
            match item:
                case Delta():
                    tokens.extend(item.tokens)
                    self._emitted += [token.id for token in item.tokens]
                    self._recovery.progressed()
                    self._last_token_ns = time.time_ns()
                    if item.cached is not None and self._cached is None:
                        self._cached = item.cached
                    if item.sent_ns is not None:
                        self._sent_ns = item.sent_ns
                case Finished():
                    self._finished = item
                case Failed():
                    self._failure = _refused(item)
                case WorkerLost():
                    self._lost(item)
        return tokens

    def _lost(self, lost: WorkerLost) -> None:
        decode, _ = self.workers
        if lost.worker_id == decode:
            message = f"decode worker {lost.worker_id} was lost: {lost.reason}"
            self._failure = RequestRefused(Code.WORKER_LOST, message, retryable=True, retry_after_s=1.0)
        elif decode is not None and not self._last_token_ns:
            log.warning("prefill worker lost; decode computes", worker_id=lost.worker_id, reason=lost.reason)
            failed = OfferFailed(
                request_id=self._job.request_id,
                attempt=self.num_attempts,
                code=Code.WORKER_LOST,
                message=lost.reason,
            )
            self._send(subjects.offer(decode), failed)

    def _overdue(self) -> RequestRefused | None:
        if self._remaining_s <= 0:
            return self._too_late()
        if self._last_token_ns and time.time_ns() - self._last_token_ns > TOKEN_SILENCE_S * 1e9:
            message = f"no token for {TOKEN_SILENCE_S:g} s"
            self._last_token_ns = time.time_ns()  # the next worker has as long
            return RequestRefused(Code.WORKER_LOST, message, retryable=True)
        return None

    def _too_late(self) -> RequestRefused:
        allowed_s = (self._job.deadline_ns - self._job.arrived_ns) / 1e9
        message = f"the request was not done within its deadline of {allowed_s:g} s"
        return RequestRefused(Code.DEADLINE_EXCEEDED, message, retryable=False)

    def _reveal(self, tokens: list[Token]) -> Piece | None:
        piece = self._transcript.push(tokens)
        if self._transcript.stopped or self._finished is not None:
            rest = self._transcript.finish()
            piece = Piece(piece.text + rest.text, piece.tokens + rest.tokens)
            self._outcome = self._end()
        if piece.text:
            self.last_text_ns = time.time_ns()
            if self.first_text_ns is None:
                self.first_text_ns = self.last_text_ns
                self._record_delivery(self.first_text_ns)
        return piece if piece.text or self._outcome is not None else None

    def _record_delivery(self, now_ns: int) -> None:
        """The first token's way from its worker, until there was text to show."""
        if self._sent_ns is not None and self._sent_ns <= now_ns:
            self._parts.telemetry.record("deliver", self._sent_ns, now_ns, self._context)

    def _end(self) -> Outcome:
        reason: FinishReason = "stop"
        if not self._transcript.stopped and self._finished is not None:
            reason = self._finished.reason
        return Outcome(
            finish_reason=reason,
            prompt_tokens=len(self._job.prompt),
            completion_tokens=self._transcript.num_tokens,
            cached=self._cached_part(),
            stop_string=self._transcript.stop_string,
        )

    def _cached_part(self) -> Cached:
        """The worker's word; a coordinator's guess only where a stop string came before any. A miss is the
        coordinator's to explain, unless the worker got less than was promised."""
        expected = self._attempt.expected if self._attempt is not None else Cached(tokens=0)
        told = self._cached
        if told is None and self._finished is not None:
            told = self._finished.cached
        if told is None:
            return expected
        return told if told.miss else msgspec.structs.replace(told, miss=expected.miss)

    def _send(self, subject: str, message: Message) -> None:
        self._parts.outbox.put(subject, message, self._context)


def _refused(failed: Failed) -> RequestRefused:
    try:
        code = Code(failed.code)
    except ValueError:  # from a newer peer
        code = Code.INTERNAL
    return RequestRefused(code, failed.message, retryable=failed.retryable)
