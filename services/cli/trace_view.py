"""A request's spans as a waterfall on a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from libs.service.span_files import StoredSpan
from services.cli.trace_tree import REQUEST_ID, TTFT_MS, RequestTree, duration_ms

_MAXwidth = 60
_TIMES_WIDTH = 34  # service, start and duration
_COLORS = {"gateway": "cyan", "prefill": "green", "decode": "magenta", "cache": "yellow"}


def print_waterfall(tree: RequestTree, console: Console) -> None:
    console.print(Text(f"request {printable(tree.request_id or '?')}   trace {tree.trace_id}", style="bold"))
    console.print(_summary(tree))
    for warning in _warnings(tree):
        console.print(Text(f"warning: {warning}", style="yellow"))
    console.print()
    name_width = max(len(_label(span, depth)) for span, depth in tree.rows)
    bar_width = min(_MAXwidth, max(10, console.width - name_width - _TIMES_WIDTH - 1))
    for span, depth in tree.rows:
        console.print(_line(tree, span, depth, name_width, bar_width), crop=False)
        if details := _details(span):
            console.print(Text(" " * (name_width + 2) + details, style="dim"), soft_wrap=True)


def _summary(tree: RequestTree) -> str:
    if tree.ttft_ms is None or tree.unaccounted_ms is None:
        ttft = "no first token"
    else:
        ttft = (
            f"TTFT {tree.ttft_ms:.1f} ms: {tree.accounted_ms:.1f} ms in spans, "
            f"{tree.unaccounted_ms:.1f} ms not accounted for"
        )
    processes = len({span.instance for span, _ in tree.rows})
    total_ms = (tree.end_ns - tree.start_ns) / 1e6
    return f"{ttft}; {total_ms:.1f} ms in all, {len(tree.rows)} spans of {processes} processes"


def _warnings(tree: RequestTree) -> list[str]:
    warnings = []
    if tree.root is None:
        warnings.append("the root span is in no file: the request is still running, or its gateway died")
    elif tree.orphans:
        names = ", ".join(sorted({span.name for span in tree.orphans}))
        warnings.append(f"{len(tree.orphans)} spans whose parent is in no file: {printable(names)}")
    if tree.other_roots:
        ids = ", ".join(str(root.attributes.get(REQUEST_ID, root.span_id)) for root in tree.other_roots)
        warnings.append(f"{len(tree.other_roots)} more requests in this trace: {printable(ids)}")
    return warnings


def _line(tree: RequestTree, span: StoredSpan, depth: int, name_width: int, bar_width: int) -> Text:
    color = _COLORS.get(span.service, "white")
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{_label(span, depth):<{name_width}}  ", style="bold red" if span.error else "")
    line.append(f"{span.service:<8}", style=color)
    line.append(f"{tree.offset_ms(span):>9.1f} {duration_ms(span):>9.1f} ms  ")
    line.append(_bar(tree, span, bar_width), style=color)
    return line


def _bar(tree: RequestTree, span: StoredSpan, width: int) -> str:
    total_ns = max(1, tree.end_ns - tree.start_ns)
    begin = round((span.start_ns - tree.start_ns) / total_ns * width)
    begin = min(max(begin, 0), width - 1)
    length = max(1, round((span.end_ns - span.start_ns) / total_ns * width))
    return " " * begin + "━" * min(length, width - begin)


def _label(span: StoredSpan, depth: int) -> str:
    return "  " * depth + printable(span.name)


def _details(span: StoredSpan) -> str:
    parts = [f"error: {span.error}"] if span.error else []
    shown: Mapping[str, object] = {k: v for k, v in span.attributes.items() if k not in (REQUEST_ID, TTFT_MS)}
    parts += [f"{key}={value}" for key, value in shown.items()]
    return printable("  ".join(parts))


def printable(text: str) -> str:
    """`text` without characters that would steer the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)
