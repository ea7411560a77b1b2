"""`baton trace`: one request as a waterfall, from the span files of all processes."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from libs.service.config import Settings
from libs.service.span_files import ROOT_MARK, StoredSpan, newest_write_ns, read_spans
from services.cli.trace_tree import REQUEST_ID, RequestTree
from services.cli.trace_view import print_waterfall

_FLUSH_S = 0.3  # a span is on disk this long after its end
_WAIT_S = 1.0  # for a span that should be there
_POLL_S = 0.1
_SETTLE_S = 0.6  # other processes' spans may come this much later than the root's end


@dataclass(frozen=True, slots=True)
class Match:
    """A request that was looked for; without `root_id` its root is in no file."""

    trace_id: str
    root_id: str | None
    shown: str  # the id that matched
    end_ns: int


def run_trace(
    settings: Settings, id: str | None, last: bool, as_json: bool, *, console: Console | None = None
) -> int:
    """Prints the request whose trace or request id begins with `id`; without `id`, or with `last`, the newest
    finished one. Returns the exit status: 0, 1 when there is no such request, 2 when `id` fits several."""
    directory = settings.trace_dir
    matches = _last(directory) if last or not id else _wait_for(directory, id)
    if not matches:
        return _fail(1, _nothing(settings, None if last else id))
    if len({match.shown for match in matches}) > 1:
        shown = sorted(match.shown for match in matches)
        more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
        return _fail(2, f"{id} is the beginning of several ids: {', '.join(shown[:5])}{more}")
    tree = _load(directory, max(matches, key=lambda match: match.end_ns))
    if as_json:
        report = msgspec.json.format(msgspec.json.encode(tree.report()), indent=2)
        sys.stdout.write(report.decode() + "\n")
    else:
        print_waterfall(tree, console or Console())
    return 0


def _last(directory: Path) -> list[Match]:
    """The newest finished request; a moment is given to one whose root is not on disk yet."""
    time.sleep(_FLUSH_S)
    deadline = time.monotonic() + _WAIT_S
    while True:
        newest = max(_roots(directory), key=lambda match: match.end_ns, default=None)
        # Written to after that request was: another may have ended meanwhile.
        settled_ns = newest.end_ns + int(_SETTLE_S * 1e9) if newest else 0
        if newest is not None and newest_write_ns(directory) <= settled_ns:
            break
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    return [newest] if newest else []


def _wait_for(directory: Path, prefix: str) -> list[Match]:
    deadline = time.monotonic() + _WAIT_S
    while True:
        matches = _find(directory, prefix)
        if any(match.root_id for match in matches) or time.monotonic() >= deadline:
            return matches
        time.sleep(_POLL_S)


def _find(directory: Path, prefix: str) -> list[Match]:
    """One match per request or trace id that begins with `prefix`."""
    found: dict[str, Match] = {}
    for field in ("trace_id", REQUEST_ID):
        # As it stands in a line: the value of this key, up to the end of the prefix.
        begin = f'"{field}":'.encode() + msgspec.json.encode(prefix)[:-1]
        for span in read_spans(directory, begin):
            shown = span.trace_id if field == "trace_id" else str(span.attributes.get(REQUEST_ID))
            if shown.startswith(prefix):
                found[shown] = _better(found.get(shown), _match(span, shown))
    return list(found.values())


def _better(old: Match | None, new: Match) -> Match:
    """The newest with a root."""
    if old is None:
        return new
    return max(old, new, key=lambda match: (match.root_id is not None, match.end_ns))


def _match(span: StoredSpan, shown: str) -> Match:
    return Match(span.trace_id, span.span_id if span.root else None, shown, span.end_ns)


def _roots(directory: Path) -> list[Match]:
    return [_match(span, span.trace_id) for span in read_spans(directory, ROOT_MARK) if span.root]


def _load(directory: Path, match: Match) -> RequestTree:
    age_s = time.time() - match.end_ns / 1e9
    if 0 <= age_s < _SETTLE_S:
        time.sleep(_SETTLE_S - age_s)
    trace_id = f'"trace_id":"{match.trace_id}"'.encode()
    spans = list(read_spans(directory, trace_id))
    root = next((span for span in spans if span.span_id == match.root_id), None)
    return RequestTree(spans, root)


def _nothing(settings: Settings, id: str | None) -> str:
    what = f"no request with id {id}" if id else "no finished request"
    if settings.otlp_endpoint:
        return f"{what} in {settings.trace_dir}: spans go to {settings.otlp_endpoint}; look there"
    return f"{what} in {settings.trace_dir}. Is it the --state-dir that the services were started with?"


def _fail(status: int, message: str) -> int:
    sys.stderr.write(f"baton trace: {message}\n")
    return status
