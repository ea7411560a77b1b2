"""Spans: one trace per request, across processes, with W3C trace context in headers.

A process has one `Telemetry`, made in its `__main__` and handed on; nothing is set globally. Finished spans
go to an OTLP collector where one is configured, else to files that `baton trace` reads (`span_files`). A
span costs some 50 us of the event loop: one per phase of a request, never one per token.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from libs.service.config import Settings
from libs.service.span_files import SpanFileExporter

Attributes = Mapping[str, AttributeValue]

_propagator = TraceContextTextMapPropagator()
_FLUSH_EVERY_MS = 200
_QUEUE_SPANS = 8192  # oldest are dropped beyond it: spans never hold up serving
_OTLP_TIMEOUT_S = 5


class Telemetry:
    """Makes spans of one process and gets them out. Thread-safe; never blocks its caller."""

    def __init__(self, service: str, instance_id: str, exporter: SpanExporter, version: str = "") -> None:
        self._exporter = exporter
        resource = Resource.create(
            {
                "service.namespace": "baton",
                "service.name": f"baton-{service}",
                "service.instance.id": instance_id,
                **({"service.version": version} if version else {}),
            }
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=_QUEUE_SPANS,
                schedule_delay_millis=_FLUSH_EVERY_MS,
                max_export_batch_size=512,
            )
        )
        self._tracer = self._provider.get_tracer("baton")

    @classmethod
    def start(cls, service: str, instance_id: str, settings: Settings) -> Telemetry:
        """`service` is "gateway", "prefill", "decode" or "cache"."""
        return cls(service, instance_id, _exporter(service, instance_id, settings))

    def open(
        self,
        name: str,
        parent: Context | None = None,
        start_ns: int | None = None,
        attributes: Attributes | None = None,
    ) -> Span:
        """A span that its owner must end. Without `parent` it is the root of a new trace."""
        return self._tracer.start_span(
            name,
            context=parent if parent is not None else Context(),
            start_time=start_ns,
            attributes=attributes,
        )

    def record(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        parent: Context,
        attributes: Attributes | None = None,
    ) -> Context:
        """A finished span, from `start_ns` to `end_ns` (ns since 1970). Returns its context, for children."""
        span = self.open(name, parent, start_ns, attributes)
        span.end(end_ns)
        return context_of(span)

    def flush(self) -> None:
        """Blocks until what was finished before is exported. Not for the event loop."""
        self._provider.force_flush()

    def shutdown(self, timeout_s: float = 2.0) -> None:
        """Exports what is left; gives up after `timeout_s` (a collector that does not answer). Idempotent."""
        thread = threading.Thread(target=self._provider.shutdown, name="telemetry-shutdown", daemon=True)
        thread.start()
        thread.join(timeout_s)


def context_of(span: Span) -> Context:
    """The context whose current span is `span`: the parent for its children."""
    return trace.set_span_in_context(span, Context())


def inject(context: Context | None = None) -> dict[str, str]:
    """Headers that carry `context` (None: the current one); empty without a span in it."""
    headers: dict[str, str] = {}
    _propagator.inject(headers, context)
    return headers


def extract(headers: Mapping[str, str]) -> Context:
    """The context that `headers` carry, keys in lower case; an empty one without a valid `traceparent`."""
    return _propagator.extract(headers, Context())


def trace_id_of(context: Context) -> str | None:
    """32 hex digits, or None without a valid span in `context`."""
    span_context = trace.get_current_span(context).get_span_context()
    return f"{span_context.trace_id:032x}" if span_context.is_valid else None


def _exporter(service: str, instance_id: str, settings: Settings) -> SpanExporter:
    if settings.otlp_endpoint is None:
        return SpanFileExporter(settings.trace_dir, service, instance_id)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=otlp_traces_url(settings.otlp_endpoint), timeout=_OTLP_TIMEOUT_S)


def otlp_traces_url(endpoint: str) -> str:
    """Where spans are posted, given the base address that OTEL_EXPORTER_OTLP_ENDPOINT holds."""
    return endpoint if endpoint.endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces"
