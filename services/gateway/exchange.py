"""One request for an answer, as it is seen from outside: its ids, its root span, its line in log and metrics."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from types import TracebackType
from typing import Final, Literal

import structlog
from aiohttp import web
from opentelemetry import trace
from opentelemetry.trace import StatusCode
from opentelemetry.util.types import AttributeValue

from libs.service.logs import get_logger
from libs.service.telemetry import Telemetry, context_of, extract, inject
from libs.wire.errors import BatonError, Code
from services.gateway.api.errors import ApiError
from services.gateway.job import Order
from services.gateway.lifecycle import Life
from services.gateway.metrics import Metrics
from services.gateway.sse import ClientGone

Operation = Literal["chat", "text_completion"]
_SANE_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}\Z")
log = get_logger()


def public_id(request: web.Request) -> str:
    """What the client calls this request; its own `x-request-id` where that can stand in a header and a log."""
    given = request.headers.get("x-request-id", "")
    return given if _SANE_ID.match(given) else uuid.uuid4().hex


class Exchange:
    """A context manager around the whole handling. `request_id` is unique even where clients repeat theirs."""

    def __init__(
        self,
        request: web.Request,
        client_id: str,
        operation: Operation,
        telemetry: Telemetry,
        metrics: Metrics,
    ) -> None:
        self.arrived_ns = time.time_ns()
        self.operation = operation
        repeats = request.headers.get("x-request-id") == client_id
        self.request_id = f"{client_id}-{uuid.uuid4().hex[:8]}" if repeats else client_id
        self._metrics = metrics
        self._life: Life | None = None
        self._prompt_tokens = 0
        self._failure: str | None = None
        self._key_id = ""
        self._model = ""
        headers = {
            name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers
        }
        self._span = telemetry.open(
            "request",
            extract(headers),
            self.arrived_ns,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "baton",
                "baton.request_id": self.request_id,
                "baton.client_request_id": client_id,
            },
        )
        self.context = context_of(self._span)
        self.headers = {name: value for name, value in inject(self.context).items() if name == "traceparent"}

    def __enter__(self) -> Exchange:
        structlog.contextvars.bind_contextvars(request_id=self.request_id)
        self._current = trace.use_span(self._span, end_on_exit=False, record_exception=False)
        self._current.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self._end(self._failure or _outcome(error), time.time_ns())
        finally:
            self._current.__exit__(None, None, None)
            structlog.contextvars.unbind_contextvars("request_id")

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer, so far."""
        return self._prompt_tokens + (0 if self._life is None else self._life.num_tokens)

    def called_by(self, key_id: str) -> None:
        self._key_id = key_id

    def ordered(self, order: Order) -> None:
        self._model = order.model[:200]
        self._span.set_attributes({"gen_ai.request.model": self._model, "baton.stream": order.stream})

    def tokenized(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._span.set_attribute("gen_ai.usage.input_tokens", prompt_tokens)

    def lives(self, life: Life) -> None:
        """From now on, what is reported of the answer is what `life` says."""
        self._life = life

    def failed(self, code: str) -> None:
        """The failure was told to the client within the answer."""
        self._failure = code

    def _end(self, outcome: str, now_ns: int) -> None:
        attributes: dict[str, AttributeValue] = {"baton.outcome": outcome}
        life = self._life
        if life is not None:
            attributes |= self._report(life)
        if outcome not in ("ok", "cancelled"):
            attributes["error.type"] = outcome
            self._span.set_status(StatusCode.ERROR)
        self._span.set_attributes(attributes)
        duration_s = (now_ns - self.arrived_ns) / 1e9
        self._metrics.ended(self.operation, outcome, duration_s)
        if self._key_id:
            attributes["baton.key"] = self._key_id
        names = {name.rpartition("baton.")[2]: value for name, value in attributes.items()}
        log.info(
            "request",
            operation=self.operation,
            model=self._model,
            prompt_tokens=self._prompt_tokens,
            duration_ms=round(duration_s * 1e3, 1),
            **names,
        )
        self._span.end(now_ns)

    def _report(self, life: Life) -> dict[str, AttributeValue]:
        decode, prefill = life.workers
        attributes: dict[str, AttributeValue] = {
            "gen_ai.usage.output_tokens": life.num_tokens,
            "baton.attempts": life.num_attempts,
            "baton.decode.worker": decode or "",
            "baton.prefill.worker": prefill or "",
        }
        cached = 0
        if (outcome := life.outcome()) is not None:
            cached = outcome.cached.tokens
            attributes["gen_ai.usage.cache_read.input_tokens"] = cached
            attributes["baton.cache.from_peer"] = outcome.cached.from_peer
            attributes["baton.cache.from_store"] = outcome.cached.from_store
            if outcome.cached.miss:
                attributes["baton.cache.miss"] = outcome.cached.miss
            attributes["gen_ai.response.finish_reasons"] = (outcome.finish_reason,)
        if life.first_text_ns is not None and life.last_text_ns is not None:
            ttft_s = (life.first_text_ns - self.arrived_ns) / 1e9
            attributes["baton.ttft_ms"] = ttft_s * 1e3
            self._metrics.first_token(self.operation, ttft_s)
            if life.num_tokens > 1:
                decoding_s = (life.last_text_ns - life.first_text_ns) / 1e9
                self._metrics.per_token(self.operation, decoding_s / (life.num_tokens - 1))
        self._metrics.tokens(self._prompt_tokens, cached, life.num_tokens)
        return attributes


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "ok"
    if isinstance(error, (asyncio.CancelledError, ClientGone)):
        return "cancelled"
    if isinstance(error, ApiError):
        return "invalid"
    return str(error.code) if isinstance(error, BatonError) else str(Code.INTERNAL)
