"""One request out of stored spans: its tree, what is missing from it, and where the time to first token went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from libs.service.span_files import StoredSpan

# The gateway's and the workers' phases, one after the other, children of the root; they add up to the TTFT.
BEFORE_FIRST_TOKEN: Final = (
    "tokenize",
    "route",
    "prefill.queue",
    "kv.pull",
    "prefill.compute",
    "handoff",
    "decode.queue",
    "decode.first_step",
    "deliver",
)
REQUEST_ID: Final = "baton.request_id"
TTFT_MS: Final = "baton.ttft_ms"


class SpanRow(msgspec.Struct, frozen=True, kw_only=True):
    """A span as `--json` prints it; `start_ms` counts from the start of the request."""

    name: str
    service: str
    instance: str
    span_id: str
    parent_id: str | None
    start_ms: float
    duration_ms: float
    error: str | None
    attributes: dict[str, Any]


class TraceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `baton trace --json` prints. `orphans` are ids of spans whose parent is in no file."""

    trace_id: str
    request_id: str | None
    ttft_ms: float | None
    accounted_ms: float
    unaccounted_ms: float | None
    spans: list[SpanRow]
    orphans: list[str]


class RequestTree:
    """The spans of one trace, seen from the request `root` (None: its root span is in no file)."""

    def __init__(self, spans: Sequence[StoredSpan], root: StoredSpan | None) -> None:
        if not spans:
            raise ValueError("a trace has at least one span")
        unique = {span.span_id: span for span in spans}
        self.root = root
        self._children: dict[str | None, list[StoredSpan]] = {}
        for span in sorted(unique.values(), key=lambda each: (each.start_ns, -each.end_ns)):
            self._children.setdefault(span.parent_id, []).append(span)
        tops = [span for span in unique.values() if span.parent_id not in unique]
        tops.sort(key=lambda each: each.start_ns)
        self.orphans = [span for span in tops if not span.root]
        self.other_roots = [span for span in tops if span.root and span is not root]
        own = ([root] if root else []) + self.orphans
        self.start_ns = root.start_ns if root else min(span.start_ns for span in unique.values())
        self.rows = [row for top in own for row in self._walk(top, 0)]
        self.trace_id = spans[0].trace_id

    @property
    def end_ns(self) -> int:
        return max((span.end_ns for span, _ in self.rows), default=self.start_ns)

    @property
    def request_id(self) -> str | None:
        named = [self.root] if self.root else [span for span, _ in self.rows]
        return next(
            (str(span.attributes[REQUEST_ID]) for span in named if REQUEST_ID in span.attributes), None
        )

    @property
    def ttft_ms(self) -> float | None:
        value = self.root.attributes.get(TTFT_MS) if self.root else None
        return float(value) if isinstance(value, int | float) else None

    @property
    def accounted_ms(self) -> float:
        """What the phases before the first token add up to."""
        siblings = self._children.get(self.root.span_id, []) if self.root else self.orphans
        ttft_ms = self.ttft_ms
        until_ns = self.end_ns if ttft_ms is None else self.start_ns + int(ttft_ms * 1e6)
        return sum(
            duration_ms(span)
            for span in siblings
            if span.name in BEFORE_FIRST_TOKEN and span.start_ns <= until_ns
        )

    @property
    def unaccounted_ms(self) -> float | None:
        return None if self.ttft_ms is None else self.ttft_ms - self.accounted_ms

    def offset_ms(self, span: StoredSpan) -> float:
        return (span.start_ns - self.start_ns) / 1e6

    def report(self) -> TraceReport:
        return TraceReport(
            trace_id=self.trace_id,
            request_id=self.request_id,
            ttft_ms=self.ttft_ms,
            accounted_ms=round(self.accounted_ms, 3),
            unaccounted_ms=None if self.unaccounted_ms is None else round(self.unaccounted_ms, 3),
            spans=[self._row(span) for span, _ in self.rows],
            orphans=[span.span_id for span in self.orphans],
        )

    def _row(self, span: StoredSpan) -> SpanRow:
        return SpanRow(
            name=span.name,
            service=span.service,
            instance=span.instance,
            span_id=span.span_id,
            parent_id=span.parent_id,
            start_ms=round(self.offset_ms(span), 3),
            duration_ms=round(duration_ms(span), 3),
            error=span.error,
            attributes=span.attributes,
        )

    def _walk(self, top: StoredSpan, depth: int) -> Iterator[tuple[StoredSpan, int]]:
        """`top` and what is below it, parents first, with their depth."""
        stack = [(top, depth)]
        while stack:
            span, depth = stack.pop()
            yield span, depth
            stack += [(child, depth + 1) for child in reversed(self._children.get(span.span_id, []))]


def duration_ms(span: StoredSpan) -> float:
    return (span.end_ns - span.start_ns) / 1e6
