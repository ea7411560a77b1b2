"""Spans: their trees, headers, the files they are kept in, and that losing them never disturbs serving."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Literal

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from libs.service.config import Settings
from libs.service.span_files import ROOT_MARK, Limits, SpanFileExporter, StoredSpan, read_spans
from libs.service.telemetry import Telemetry, context_of, extract, inject, otlp_traces_url, trace_id_of

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def everything(directory: Path) -> list[StoredSpan]:
    return list(read_spans(directory, b"{"))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path)


class TestHeaders:
    @pytest.mark.parametrize("flags", ["01", "03"])
    def test_a_valid_traceparent_is_continued(self, flags: str, settings: Settings) -> None:
        parent = extract({"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-{flags}", "tracestate": "a=b"})
        assert trace_id_of(parent) == TRACE_ID
        telemetry = Telemetry.start("gateway", "g1", settings)
        span = telemetry.open("request", parent)
        headers = inject(context_of(span))
        assert headers["traceparent"].split("-")[1] == TRACE_ID
        assert int(headers["traceparent"].split("-")[3], 16) & 1
        assert headers["tracestate"] == "a=b"
        span.end()
        telemetry.shutdown()
        (stored,) = everything(settings.trace_dir)
        assert (stored.trace_id, stored.parent_id, stored.root) == (TRACE_ID, SPAN_ID, True)

    @pytest.mark.parametrize(
        "value",
        [
            "",
            "nonsense",
            f"00-{TRACE_ID}-{SPAN_ID}",
            f"00-{TRACE_ID[:-1]}-{SPAN_ID}-01",
            f"00-{'0' * 32}-{SPAN_ID}-01",
            f"00-{TRACE_ID}-{'0' * 16}-01",
            f"ff-{TRACE_ID}-{SPAN_ID}-01",
            f"00-{TRACE_ID}-{SPAN_ID}-01-more",
            f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
            f"00-{TRACE_ID}-{SPAN_ID}-zz",
            "\x00" * 100,
        ],
    )
    def test_a_malformed_traceparent_is_ignored(self, value: str) -> None:
        context = extract({"traceparent": value})
        assert trace_id_of(context) is None
        assert inject(context) == {}

    def test_a_caller_who_does_not_sample_is_obeyed(self, settings: Settings) -> None:
        telemetry = Telemetry.start("gateway", "g1", settings)
        parent = extract({"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"})
        span = telemetry.open("request", parent)
        assert inject(context_of(span))["traceparent"].endswith("-00")
        span.end()
        telemetry.shutdown()
        assert everything(settings.trace_dir) == []

    def test_nothing_is_injected_without_a_span(self) -> None:
        assert inject() == {}
        assert inject(Context()) == {}


class TestSpans:
    def test_a_tree_with_explicit_times(self, settings: Settings) -> None:
        gateway = Telemetry.start("gateway", "g1", settings)
        decode = Telemetry.start("decode", "d1", settings)
        root = gateway.open("request", None, 1_000, {"baton.request_id": "r1"})
        gateway.record("tokenize", 1_100, 1_200, context_of(root), {"tokens": 3})
        remote = extract(inject(context_of(root)))  # through message headers
        inner = decode.record("decode", 1_300, 1_900, remote)
        decode.record("decode.first_step", 1_300, 1_400, inner)
        root.end(2_000)
        gateway.shutdown()
        gateway.shutdown()  # idempotent
        decode.shutdown()
        spans = {span.name: span for span in everything(settings.trace_dir)}
        assert {span.trace_id for span in spans.values()} == {trace_id_of(remote)}
        assert [name for name, span in spans.items() if span.root] == ["request"]
        assert spans["request"].parent_id is None
        assert spans["tokenize"].parent_id == spans["decode"].parent_id == spans["request"].span_id
        assert spans["decode.first_step"].parent_id == spans["decode"].span_id
        assert (spans["decode"].start_ns, spans["decode"].end_ns) == (1_300, 1_900)
        assert (spans["decode"].service, spans["decode"].instance) == ("decode", "d1")
        assert spans["tokenize"].attributes == {"tokens": 3}
        assert spans["request"].attributes == {"baton.request_id": "r1"}

    def test_the_resource_names_the_process(self, settings: Settings) -> None:
        telemetry = Telemetry.start("prefill", "p1", settings)
        span = telemetry.open("x")
        assert isinstance(span, ReadableSpan)
        assert span.resource.attributes["service.name"] == "baton-prefill"
        assert span.resource.attributes["service.instance.id"] == "p1"
        telemetry.shutdown()

    def test_nothing_global_is_set(self, settings: Settings) -> None:
        before = trace.get_tracer_provider()
        Telemetry.start("prefill", "p1", settings).shutdown()
        assert trace.get_tracer_provider() is before

    def test_an_error_is_kept(self, settings: Settings) -> None:
        telemetry = Telemetry.start("gateway", "g1", settings)
        span = telemetry.open("request")
        span.set_status(trace.StatusCode.ERROR, "worker lost")
        span.end()
        telemetry.shutdown()
        assert everything(settings.trace_dir)[0].error == "worker lost"

    def test_attributes_that_json_does_not_take(self, settings: Settings) -> None:
        telemetry = Telemetry.start("gateway", "g1", settings)
        telemetry.open("x", attributes={"text": "a\ud800b", "nan": float("nan")}).end()
        telemetry.open("y", attributes={"list": [1, 2], "nan": float("nan")}).end()
        telemetry.shutdown()
        first, second = everything(settings.trace_dir)
        assert first.root
        assert first.attributes == {"text": "a?b", "nan": "nan"}
        assert second.attributes == {"list": [1, 2], "nan": None}

    def test_spans_come_out_by_themselves_soon(self, settings: Settings) -> None:
        telemetry = Telemetry.start("gateway", "g1", settings)
        telemetry.open("request").end()
        deadline = time.monotonic() + 10
        while not everything(settings.trace_dir):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        telemetry.shutdown()


class Stuck(SpanExporter):
    """A collector that takes for ever."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.release.wait(60)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None: ...


class Collector(ThreadingHTTPServer):
    """Keeps the path and body of what is posted."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes]] = []
        kept = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                kept.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class TestCollectors:
    def test_a_stuck_exporter_blocks_neither_spans_nor_shutdown(self) -> None:
        exporter = Stuck()
        telemetry = Telemetry("gateway", "g1", exporter)
        done = threading.Event()

        def work() -> None:
            for _ in range(9_500):  # more than the queue holds
                telemetry.open("x").end()
            telemetry.shutdown(timeout_s=0.2)
            done.set()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert done.wait(50)
        exporter.release.set()

    def test_a_collector_that_is_not_there(self, tmp_path: Path) -> None:
        telemetry = Telemetry.start(
            "gateway", "g1", Settings(state_dir=tmp_path, otlp_endpoint="http://127.0.0.1:1")
        )
        telemetry.open("x").end()
        begin = time.monotonic()
        telemetry.shutdown(timeout_s=0.5)
        assert time.monotonic() - begin < 10
        assert not (tmp_path / "traces").exists()

    def test_a_collector_gets_the_spans(self, tmp_path: Path) -> None:
        collector = Collector()
        telemetry = Telemetry.start("decode", "d1", Settings(state_dir=tmp_path, otlp_endpoint=collector.url))
        telemetry.open("x").end()
        telemetry.shutdown(timeout_s=10)
        collector.shutdown()
        ((path, body),) = collector.requests
        assert path == "/v1/traces"
        (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
        names = {each.key: each.value.string_value for each in resource.resource.attributes}
        assert (names["service.name"], names["service.instance.id"]) == ("baton-decode", "d1")
        assert resource.scope_spans[0].spans[0].name == "x"

    @pytest.mark.parametrize(
        ("endpoint", "url"),
        [
            ("http://c:4318", "http://c:4318/v1/traces"),
            ("http://c:4318/", "http://c:4318/v1/traces"),
            ("http://c:4318/v1/traces", "http://c:4318/v1/traces"),
            ("http://c/base", "http://c/base/v1/traces"),
        ],
    )
    def test_otlp_address(self, endpoint: str, url: str) -> None:
        assert otlp_traces_url(endpoint) == url


def spans(count: int, size: int = 10) -> list[ReadableSpan]:
    """Finished spans named 0, 1, ... with an attribute of `size` characters."""
    collected: list[ReadableSpan] = []

    class Collect(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            collected.extend(spans)
            return SpanExportResult.SUCCESS

    telemetry = Telemetry("gateway", "g1", Collect())
    for number in range(count):
        telemetry.open(str(number), attributes={"padding": "x" * size}).end()
        if number % 100 == 99:
            telemetry.flush()
    telemetry.shutdown()
    return collected


class FullFile:
    """A file on a full disk: takes a part of what it is given, then nothing."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def __enter__(self) -> FullFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        self._file.write(data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")


class TestFiles:
    def test_files_are_rotated_and_bounded(self, tmp_path: Path) -> None:
        exporter = SpanFileExporter(tmp_path, "gateway", "g1", Limits(file_bytes=10_000))
        for span in spans(200, size=300):
            assert exporter.export([span]) == SpanExportResult.SUCCESS
        sizes = [path.stat().st_size for path in tmp_path.iterdir()]
        assert len(sizes) == 2
        assert all(size <= 10_000 for size in sizes)
        assert {"199", "198"} <= {span.name for span in everything(tmp_path)}  # the newest are kept

    @pytest.mark.parametrize("limits", [Limits(num_files=5), Limits(file_bytes=1000, total_bytes=3600)])
    def test_only_the_newest_files_are_kept(self, tmp_path: Path, limits: Limits) -> None:
        """Five files, or as many spans of some 600 bytes as fit beside the 1000 of a new file."""
        (tmp_path / "something.else").touch()
        (span,) = spans(1, size=300)
        for number in range(20):
            SpanFileExporter(tmp_path, "gateway", f"g{number}", limits).export([span])
            time.sleep(0.002)  # another time of change
        kept = sorted(stored.instance for stored in everything(tmp_path))
        assert kept == ["g15", "g16", "g17", "g18", "g19"]
        assert (tmp_path / "something.else").exists()

    def test_a_file_that_somebody_removed_is_made_again(self, tmp_path: Path) -> None:
        directory = tmp_path / "traces"
        exporter = SpanFileExporter(directory, "gateway", "g1")
        first, second = spans(2)
        exporter.export([first])
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
        exporter.export([second])
        assert [span.name for span in everything(directory)] == ["1"]

    def test_torn_and_foreign_lines_are_passed_over(self, tmp_path: Path) -> None:
        exporter = SpanFileExporter(tmp_path, "gateway", "g1")
        exporter.export(spans(2))
        (path,) = tmp_path.iterdir()
        data = path.read_bytes()
        path.write_bytes(b'{"trace_id": 5}\n\xff\xfe{\n\n' + data[:-30])  # a crash in the middle of a line
        assert [span.name for span in everything(tmp_path)] == ["0"]
        (tmp_path / "z.jsonl").mkdir()
        assert [span.name for span in everything(tmp_path)] == ["0"]
        assert [span.name for span in read_spans(tmp_path, ROOT_MARK)] == ["0"]
        assert everything(tmp_path / "absent") == []

    def test_a_full_disk_loses_spans_and_nothing_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        exporter = SpanFileExporter(tmp_path, "gateway", "g1")
        before, during, after = spans(3)
        exporter.export([before])
        real_open = Path.open

        def full(self: Path, mode: Literal["ab"], **options: int) -> FullFile:
            return FullFile(real_open(self, mode))

        monkeypatch.setattr(Path, "open", full)
        assert exporter.export([during]) == SpanExportResult.FAILURE
        assert exporter.export([during]) == SpanExportResult.FAILURE
        monkeypatch.setattr(Path, "open", real_open)
        assert exporter.export([after]) == SpanExportResult.SUCCESS
        assert exporter.dropped == 2
        assert [span.name for span in everything(tmp_path)] == ["0", "2"]

    def test_a_directory_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "traces").write_text("a file")
        telemetry = Telemetry.start("gateway", "g1", Settings(state_dir=tmp_path))
        telemetry.open("x").end()
        telemetry.shutdown()
        assert (tmp_path / "traces").read_text() == "a file"
