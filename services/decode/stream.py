"""Tokens on their way to gateways: numbered per request, one message per engine step and gateway."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

from opentelemetry.context import Context

from libs.service.outbox import Outbox
from libs.wire import subjects
from libs.wire.errors import Code
from libs.wire.messages import Cached, Delta, Failed, Finished, FinishReason, StepOutput, Token


@dataclass(slots=True)
class Stream:
    """One request's answer. `num_sent` tokens have been handed to the gateway, those of earlier workers included;
    `ended` once it has its end.
    """

    request_id: str
    attempt: int
    gateway_id: str
    context: Context
    num_sent: int = 0
    has_sent: bool = False  # in this attempt
    ended: bool = False


class Streams:
    """Collects what a step produced and publishes it per gateway. `flush` ends a step."""

    def __init__(self, outbox: Outbox, worker_id: str) -> None:
        self._outbox = outbox
        self._worker_id = worker_id
        self._pending: defaultdict[str, list[Delta | Finished | Failed]] = defaultdict(list)

    def tokens(self, stream: Stream, tokens: tuple[Token, ...], cached: Cached) -> None:
        is_first = not stream.has_sent
        delta = Delta(
            request_id=stream.request_id,
            attempt=stream.attempt,
            seq=stream.num_sent,
            tokens=tokens,
            cached=cached if is_first else None,
            sent_ns=time.time_ns() if is_first else None,
        )
        stream.num_sent += len(tokens)
        stream.has_sent = True
        self._pending[stream.gateway_id].append(delta)

    def finish(self, stream: Stream, reason: FinishReason, cached: Cached) -> None:
        end = Finished(
            request_id=stream.request_id,
            attempt=stream.attempt,
            reason=reason,
            num_tokens=stream.num_sent,
            cached=cached,
        )
        self._end(stream, end)

    def fail(self, stream: Stream, code: Code, message: str, *, retryable: bool) -> None:
        end = Failed(
            request_id=stream.request_id,
            attempt=stream.attempt,
            code=code,
            message=message,
            retryable=retryable,
        )
        self._end(stream, end)

    def flush(self) -> None:
        """Publishes one StepOutput for each gateway that has something."""
        for gateway_id, outputs in self._pending.items():
            message = StepOutput(worker_id=self._worker_id, outputs=tuple(outputs))
            self._outbox.put(subjects.outputs(gateway_id), message)
        self._pending.clear()

    def _end(self, stream: Stream, end: Finished | Failed) -> None:
        if not stream.ended:  # a request ends once
            stream.ended = True
            self._pending[stream.gateway_id].append(end)
