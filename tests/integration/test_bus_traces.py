"""One trace across processes: spans made by three services that only share a NATS server."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from libs.service.bus import Bus, Incoming
from libs.service.config import Settings
from libs.service.telemetry import Telemetry, context_of, extract
from libs.wire.errors import Code, RequestRefused
from libs.wire.messages import Abort, Accepted, Message, Release
from services.cli.trace import run_trace
from tests.natsd import nats_url  # noqa: F401  # a fixture

PATIENCE_S = 20.0


class Service:
    """A process's bus and telemetry. Refuses the first request it gets if `refuses_first`."""

    def __init__(self, name: str, bus: Bus, settings: Settings, *, refuses_first: bool = False) -> None:
        self.bus = bus
        self.telemetry = Telemetry.start(name, f"{name}-1", settings)
        self.aborted = asyncio.Event()
        self._refuses = refuses_first

    async def on_release(self, message: Release, incoming: Incoming) -> Message:
        now = time.time_ns()
        self.telemetry.record("prefill.queue", now, now + 1000, incoming.context)
        if self._refuses:
            self._refuses = False
            raise RequestRefused(Code.OVERLOADED, "full", retryable=True)
        await self.bus.publish("decode", Abort(request_id="r1", attempt=1), context=incoming.context)
        return Accepted(worker_id="p")

    async def on_abort(self, message: Abort, incoming: Incoming) -> None:
        now = time.time_ns()
        inner = self.telemetry.record("decode", now, now + 2000, incoming.context)
        self.telemetry.record("decode.first_step", now, now + 1000, inner)
        self.aborted.set()


async def test_a_request_with_a_retry_is_one_tree(
    nats_url: str,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Cases row 63."""
    settings = Settings(state_dir=tmp_path)
    buses = [await Bus.connect(nats_url, name) for name in ("gateway", "prefill", "decode")]
    gateway = Service("gateway", buses[0], settings)
    prefill = Service("prefill", buses[1], settings, refuses_first=True)
    decode = Service("decode", buses[2], settings)
    await prefill.bus.subscribe("prefill", (Release,), prefill.on_release)
    await decode.bus.subscribe("decode", (Abort,), decode.on_abort)

    client = extract({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-03"})
    root = gateway.telemetry.open("request", client, None, {"baton.request_id": "r1"})
    context = context_of(root)
    with pytest.raises(RequestRefused):
        await gateway.bus.request("prefill", Release(lease_id="1"), Accepted, timeout_s=5, context=context)
    await gateway.bus.request("prefill", Release(lease_id="1"), Accepted, timeout_s=5, context=context)
    await asyncio.wait_for(decode.aborted.wait(), PATIENCE_S)
    root.end()
    for service in (gateway, prefill, decode):
        await service.bus.drain()
        service.telemetry.shutdown()

    assert await asyncio.to_thread(run_trace, settings, "r1", False, True) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (report["trace_id"], report["orphans"]) == ("ab" * 16, [])
    spans = report["spans"]
    ids = {span["span_id"]: span["name"] for span in spans}
    parents = sorted((span["name"], ids.get(span["parent_id"])) for span in spans)
    assert parents == [
        ("decode", "request"),
        ("decode.first_step", "decode"),
        ("prefill.queue", "request"),
        ("prefill.queue", "request"),
        ("request", None),
    ]
    assert {span["service"] for span in spans} == {"gateway", "prefill", "decode"}
