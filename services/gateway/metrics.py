"""Numbers for Prometheus. Labels come from fixed sets: nothing a client sends ever becomes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from libs.wire.errors import Code

Outcome = str  # "ok", "cancelled", "invalid" or a `Code`
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_SECONDS: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
_OUTCOMES: Final = frozenset({"ok", "cancelled", "invalid", *Code})


class Metrics:
    """One registry per gateway, so that several can live in one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        labels = ("gen_ai_operation_name", "outcome")
        self._duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "From a request's arrival to the end of its answer",
            labels,
            buckets=_SECONDS,
            registry=registry,
        )
        self._first = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From a request's arrival to the first text of its answer",
            labels[:1],
            buckets=_SECONDS,
            registry=registry,
        )
        self._each = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time of each token after the first, one sample per answer",
            labels[:1],
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self._tokens = Counter(
            "baton_gateway_tokens", "Tokens of answered requests", ("kind",), registry=registry
        )
        self._http = Counter(
            "baton_gateway_http_requests", "HTTP requests answered", ("endpoint", "status"), registry=registry
        )
        self._retries = Counter(
            "baton_gateway_retries", "Attempts beyond a request's first", ("code",), registry=registry
        )
        self._irregular = Counter(
            "baton_gateway_irregular_outputs",
            "Outputs of workers that were not passed on as they came",
            ("kind",),
            registry=registry,
        )
        self._inflight = Gauge(
            "baton_gateway_inflight_requests", "Requests this gateway owns", registry=registry
        )
        self._workers = Gauge("baton_gateway_workers", "Live, usable workers", ("role",), registry=registry)

    def watch(self, inflight: Callable[[], float], workers: dict[str, Callable[[], float]]) -> None:
        """Where the gauges' values are read from when somebody asks."""
        self._inflight.set_function(inflight)
        for role, count in workers.items():
            self._workers.labels(role).set_function(count)

    def irregular(self, kind: str) -> None:
        self._irregular.labels(kind).inc()

    def retried(self, code: Code) -> None:
        self._retries.labels(str(code)).inc()

    def http(self, endpoint: str, status: int) -> None:
        """`endpoint` is a route's pattern, never a path."""
        self._http.labels(endpoint, str(status)).inc()

    def ended(self, operation: str, outcome: Outcome, duration_s: float) -> None:
        label = outcome if outcome in _OUTCOMES else str(Code.INTERNAL)
        self._duration.labels(operation, label).observe(duration_s)

    def first_token(self, operation: str, ttft_s: float) -> None:
        self._first.labels(operation).observe(ttft_s)

    def per_token(self, operation: str, seconds: float) -> None:
        self._each.labels(operation).observe(seconds)

    def tokens(self, prompt: int, cached: int, completion: int) -> None:
        for kind, number in (("prompt", prompt), ("cached", cached), ("completion", completion)):
            self._tokens.labels(kind).inc(number)

    def render(self) -> bytes:
        """All of them, in Prometheus' text format."""
        return generate_latest(self._registry)
