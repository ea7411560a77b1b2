"""`baton trace` over span files written by real Telemetry objects."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.context import Context
from rich.console import Console

from libs.service.config import Settings
from libs.service.telemetry import Telemetry, context_of, extract, inject
from services.cli import trace
from services.cli.trace import run_trace

MS = 1_000_000
PHASES = [  # name, service, start and length in ms after the request's start: 100 ms to the first token
    ("tokenize", "gateway", 0, 2),
    ("route", "gateway", 2, 3),
    ("prefill.queue", "prefill", 5, 5),
    ("kv.pull", "prefill", 10, 10),
    ("prefill.compute", "prefill", 20, 50),
    ("handoff", "decode", 70, 10),
    ("decode.queue", "decode", 80, 8),
    ("decode.first_step", "decode", 88, 10),
    ("decode", "decode", 98, 400),
]


class Cluster:
    """One Telemetry per service, all writing to one directory."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.services = {
            name: Telemetry.start(name, f"{name}-1", settings) for name in ("gateway", "prefill", "decode")
        }

    def request(
        self,
        request_id: str,
        *,
        parent: Context | None = None,
        start_ns: int | None = None,
        ttft_ms: float | None = 100.0,
        ends: bool = True,
        flush: bool = False,
    ) -> str:
        """Records a request as the services do; returns its trace id. `ends` False: the root is never ended."""
        start_ns = start_ns or time.time_ns() - 510 * MS
        root = self.services["gateway"].open("request", parent, start_ns, {"baton.request_id": request_id})
        context = extract(inject(context_of(root)))
        for name, service, begin_ms, length_ms in PHASES:
            begin = start_ns + begin_ms * MS
            here = context_of(root) if service == "gateway" else context
            self.services[service].record(name, begin, begin + length_ms * MS, here, {"n": begin_ms})
        if ttft_ms is not None:
            root.set_attribute("baton.ttft_ms", ttft_ms)
        if ends:
            root.end(start_ns + 500 * MS)
        if flush:
            self.flush()
        return f"{root.get_span_context().trace_id:032x}"

    def flush(self) -> None:
        for telemetry in self.services.values():
            telemetry.flush()

    def stop(self) -> None:
        for telemetry in self.services.values():
            telemetry.shutdown()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(trace, "_FLUSH_S", 0.05)
    monkeypatch.setattr(trace, "_SETTLE_S", 0.1)
    monkeypatch.setattr(trace, "_WAIT_S", 0.3)
    running = Cluster(Settings(state_dir=tmp_path))
    yield running
    running.stop()


def shown(cluster: Cluster, id: str | None = None) -> str:
    """The waterfall as text."""
    out = io.StringIO()
    console = Console(file=out, width=120)
    assert run_trace(cluster.settings, id, id is None, False, console=console) == 0
    return out.getvalue()


def report(cluster: Cluster, capsys: pytest.CaptureFixture[str], id: str | None = None) -> dict[str, Any]:
    assert run_trace(cluster.settings, id, id is None, True) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


class TestJson:
    def test_the_newest_request(self, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
        cluster.request("r-old", start_ns=time.time_ns() - 60_000 * MS)
        trace_id = cluster.request("r-new")
        cluster.flush()
        found = report(cluster, capsys)
        assert (found["request_id"], found["trace_id"]) == ("r-new", trace_id)
        assert found["ttft_ms"] == 100
        assert found["accounted_ms"] == pytest.approx(98)
        assert found["unaccounted_ms"] == pytest.approx(2)
        assert found["orphans"] == []
        spans = found["spans"]
        assert [span["name"] for span in spans] == ["request", *(phase[0] for phase in PHASES)]
        ids = {span["span_id"] for span in spans}
        assert [span["name"] for span in spans if span["parent_id"] not in ids] == ["request"]
        decode = spans[-1]
        assert (decode["service"], decode["instance"]) == ("decode", "decode-1")
        assert (decode["start_ms"], decode["duration_ms"]) == (98, 400)
        assert decode["attributes"] == {"n": 98}

    @pytest.mark.parametrize("by", ["trace", "trace prefix", "request", "request prefix"])
    def test_by_id(self, cluster: Cluster, capsys: pytest.CaptureFixture[str], by: str) -> None:
        trace_id = cluster.request("chatcmpl-abc")
        cluster.request("chatcmpl-xyz")
        cluster.flush()
        id = {
            "trace": trace_id,
            "trace prefix": trace_id[:20],
            "request": "chatcmpl-abc",
            "request prefix": "chatcmpl-a",
        }[by]
        assert report(cluster, capsys, id)["request_id"] == "chatcmpl-abc"

    def test_a_client_that_sent_a_traceparent(
        self, cluster: Cluster, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Its span is the root's parent, and no orphan makes of that; two requests may share one trace."""
        parent = extract({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"})
        cluster.request("r1", parent=parent, start_ns=time.time_ns() - 5_000 * MS)
        cluster.request("r2", parent=parent)
        cluster.flush()
        for id in ("r1", "r2"):
            found = report(cluster, capsys, id)
            assert (found["request_id"], found["trace_id"], found["orphans"]) == (id, "ab" * 16, [])
            assert len(found["spans"]) == 1 + len(PHASES)
        assert report(cluster, capsys, "ab" * 16)["request_id"] == "r2"
        assert "1 more requests in this trace: r1" in shown(cluster, "r2")

    def test_a_request_without_a_first_token(
        self, cluster: Cluster, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cluster.request("r1", ttft_ms=None)
        cluster.flush()
        found = report(cluster, capsys)
        assert (found["ttft_ms"], found["unaccounted_ms"]) == (None, None)
        assert "no first token" in shown(cluster)

    def test_what_comes_after_the_first_token_is_not_counted(
        self, cluster: Cluster, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cluster.request("r1", ttft_ms=75.0)  # decode.queue and decode.first_step begin later
        cluster.flush()
        assert report(cluster, capsys)["accounted_ms"] == pytest.approx(80)


class TestWaiting:
    def test_a_root_that_is_not_on_disk_yet(
        self, cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(trace, "_WAIT_S", 5.0)
        later = threading.Timer(0.3, cluster.request, ["r1"], {"flush": True})
        later.start()
        assert report(cluster, capsys)["request_id"] == "r1"
        later.join()

    def test_by_id_too(
        self, cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(trace, "_WAIT_S", 5.0)
        later = threading.Timer(0.3, cluster.request, ["r1"], {"flush": True})
        later.start()
        assert report(cluster, capsys, "r1")["request_id"] == "r1"
        later.join()

    def test_a_request_that_still_runs_is_not_the_last_finished(
        self, cluster: Cluster, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cluster.request("r-old", start_ns=time.time_ns() - 5_000 * MS)
        cluster.request("r-running", ends=False)
        cluster.flush()
        assert report(cluster, capsys)["request_id"] == "r-old"

    def test_a_trace_without_a_root_is_shown_as_it_is(
        self, cluster: Cluster, capsys: pytest.CaptureFixture[str]
    ) -> None:
        trace_id = cluster.request("r1", ends=False)
        cluster.flush()
        found = report(cluster, capsys, trace_id)
        assert len(found["orphans"]) == len(PHASES)
        assert found["ttft_ms"] is None
        assert "the root span is in no file" in shown(cluster, trace_id)


class TestFailures:
    @pytest.mark.parametrize("id", [None, "nothing-like-it", '"', "ab"])
    def test_nothing_found(
        self, cluster: Cluster, capsys: pytest.CaptureFixture[str], id: str | None
    ) -> None:
        assert run_trace(cluster.settings, id, id is None, True) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert str(cluster.settings.trace_dir) in captured.err

    def test_spans_that_go_elsewhere(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        settings = Settings(state_dir=tmp_path, otlp_endpoint="http://collector:4318")
        assert run_trace(settings, "x", False, False) == 1
        assert "http://collector:4318" in capsys.readouterr().err

    def test_an_id_of_several(self, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
        for number in range(7):
            cluster.request(f"chatcmpl-{number}")
        cluster.flush()
        assert run_trace(cluster.settings, "chatcmpl", False, False) == 2
        message = capsys.readouterr().err
        assert "chatcmpl-0, chatcmpl-1" in message
        assert "2 more" in message

    def test_orphans_are_told(self, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
        parent = extract({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"})
        cluster.request("r1", parent=parent)
        lost = extract({"traceparent": f"00-{'ab' * 16}-{'ef' * 8}-01"})
        now = time.time_ns()
        cluster.services["decode"].record("decode.queue", now - 5 * MS, now, lost)
        cluster.flush()
        assert len(report(cluster, capsys, "r1")["orphans"]) == 1
        assert "1 spans whose parent is in no file: decode.queue" in shown(cluster, "r1")


class TestWaterfall:
    def test_it_shows_each_span(self, cluster: Cluster) -> None:
        cluster.request("r1")
        cluster.flush()
        text = shown(cluster)
        assert "request r1" in text
        assert "TTFT 100.0 ms: 98.0 ms in spans, 2.0 ms not accounted for" in text
        assert "10 spans of 3 processes" in text
        lines = text.splitlines()
        (compute,) = [line for line in lines if "prefill.compute" in line]
        assert compute.split()[:5] == ["prefill.compute", "prefill", "20.0", "50.0", "ms"]
        assert "━━━━" in compute
        assert "n=20" in lines[lines.index(compute) + 1]

    def test_nothing_steers_the_terminal(self, cluster: Cluster) -> None:
        root = cluster.services["gateway"].open(
            "request", None, None, {"baton.request_id": "r1", "model": "\x1b[31m[bold]x\n"}
        )
        root.end()
        cluster.flush()
        text = shown(cluster)
        assert "\x1b" not in text
        assert "model=?[31m[bold]x?" in text
