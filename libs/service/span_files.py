"""Finished spans on disk, for machines without a collector: written by every process, read by `baton trace`.

A process appends to `<instance>-<pid>.jsonl` in the trace directory, one span a line. A full file becomes
`<instance>-<pid>.old.jsonl`, in place of the one before. Whoever begins a file removes the oldest of all until
`Limits` hold. Losing spans is no error of serving.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from libs.service.logs import get_logger

_log = get_logger(__name__)

ROOT_MARK = b'"root":true'  # as it stands in the line of a span that is the root of its request


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the trace directory. Between two new files it may grow by what the running processes append."""

    file_bytes: int = 8 * 1024 * 1024
    total_bytes: int = 256 * 1024 * 1024
    num_files: int = 256  # two for each process, and those of processes that have ended


class StoredSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a span file. Times are ns since 1970; ids are hex digits.

    `root`: the request begins here, whether or not the client sent a `traceparent` (then `parent_id` names a
    span of the client's, which is in no file).
    """

    trace_id: str
    span_id: str
    parent_id: str | None
    root: bool
    name: str
    service: str
    instance: str
    start_ns: int
    end_ns: int
    error: str | None = None
    attributes: dict[str, Any] = {}


_decoder = msgspec.json.Decoder(StoredSpan)


class SpanFileExporter(SpanExporter):
    """Appends spans to this process's file. Used by one thread at a time."""

    def __init__(
        self,
        directory: Path,
        service: str,
        instance_id: str,
        limits: Limits = Limits(),  # frozen
    ) -> None:
        self.dropped = 0  # spans that could not be written
        self._directory = directory
        self._service = service
        self._instance_id = instance_id
        self._path = directory / f"{instance_id}-{os.getpid()}.jsonl"
        self._old_path = self._path.with_suffix(".old.jsonl")
        self._limits = limits
        self._torn = False  # the last write failed and may have left half a line
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = b"".join(_line(span, self._service, self._instance_id) for span in spans)
        try:
            self._append(lines)
        except OSError as error:
            self.dropped += len(spans)
            self._torn = True
            if not self._failing:
                self._failing = True
                _log.warning("cannot write spans; dropping them", path=str(self._path), error=str(error))
            return SpanExportResult.FAILURE
        if self._failing:
            self._failing = False
            _log.info("writing spans again", path=str(self._path), dropped=self.dropped)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is held: each export opens, writes and closes."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True

    def _append(self, lines: bytes) -> None:
        # Opened each time: the file may have been removed as one of the oldest, or by a user.
        size = _size(self._path)
        if size is not None and size + len(lines) > self._limits.file_bytes:
            self._path.replace(self._old_path)
            size = None
        if size is None:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            _remove_oldest(self._directory, self._limits)
        with self._path.open("ab", buffering=0) as file:
            data = b"\n" + lines if self._torn else lines
            if file.write(data) != len(data):  # a full disk may take a part without an error
                raise OSError("short write")
        self._torn = False


def read_spans(directory: Path, containing: bytes) -> Iterator[StoredSpan]:
    """Spans whose line holds `containing`, newest file first. Lines that are no spans are passed over."""
    for path in span_files(directory):
        try:
            data = path.read_bytes()
        except OSError:  # removed meanwhile, or not ours to read
            continue
        yield from _matching(data, containing)


def newest_write_ns(directory: Path) -> int:
    """When a span was last written, ns since 1970; 0 for never."""
    return max(
        (status.st_mtime_ns for path in directory.glob("*.jsonl") if (status := _stat(path))), default=0
    )


def span_files(directory: Path) -> list[Path]:
    """Newest first; empty when the directory does not exist."""
    found = [(status.st_mtime_ns, path) for path in directory.glob("*.jsonl") if (status := _stat(path))]
    return [path for _, path in sorted(found, reverse=True)]


def _matching(data: bytes, containing: bytes) -> Iterator[StoredSpan]:
    at = data.find(containing)
    while at >= 0:
        begin = data.rfind(b"\n", 0, at) + 1
        end = data.find(b"\n", at)
        end = len(data) if end < 0 else end
        span = _parse(data[begin:end])
        if span is not None:
            yield span
        at = data.find(containing, end)


def _parse(line: bytes) -> StoredSpan | None:
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError:  # torn by a crash or a full disk
        return None


def _line(span: ReadableSpan, service: str, instance_id: str) -> bytes:
    context, parent = span.get_span_context(), span.parent
    assert context is not None
    stored = StoredSpan(
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id=f"{parent.span_id:016x}" if parent else None,
        root=parent is None or (parent.is_remote and service == "gateway"),
        name=span.name,
        service=service,
        instance=instance_id,
        start_ns=span.start_time or 0,
        end_ns=span.end_time or 0,
        error=None if span.status.is_ok or span.status.is_unset else span.status.description or "error",
        attributes=dict(span.attributes or {}),
    )
    fields = msgspec.structs.asdict(stored)
    try:
        return orjson.dumps(fields, default=str) + b"\n"
    except TypeError:  # lone surrogates in an attribute
        fields["attributes"] = {_utf8(key): _utf8(str(value)) for key, value in stored.attributes.items()}
        fields["error"] = stored.error and _utf8(stored.error)
        return orjson.dumps(fields) + b"\n"


def _utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _remove_oldest(directory: Path, limits: Limits) -> None:
    """Makes room for one more file."""
    total_bytes = limits.file_bytes
    for count, path in enumerate(span_files(directory), start=2):
        total_bytes += _size(path) or 0
        if count > limits.num_files or total_bytes > limits.total_bytes:
            path.unlink(missing_ok=True)


def _size(path: Path) -> int | None:
    status = _stat(path)
    return status.st_size if status else None


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
