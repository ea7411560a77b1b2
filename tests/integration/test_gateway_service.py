"""The gateway as a service: readiness, status, metrics, traces, draining, its process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from libs.service.bus import Bus
from libs.wire import subjects
from libs.wire.errors import Code
from libs.wire.messages import Generate, ServiceStatus, StatusRequest, Token
from tests.gateway_rig import MODEL, FakeWorker, Rig, chat, emit_script, hang, parse_events, place, rig, until
from tests.natsd import nats_url  # noqa: F401 (fixture)

CHAT = "/v1/chat/completions"
ROOT = Path(__file__).parents[2]


@pytest.fixture
async def r(nats_url: str, tmp_path: Path) -> AsyncIterator[Rig]:  # noqa: F811
    async with rig(nats_url, tmp_path) as made:
        yield made


# ---------------------------------------------------------------- readiness


async def test_ready_needs_a_decode_worker_and_says_so(r: Rig) -> None:
    assert (await r.get("/health"))[0] == 200
    status, answer = await r.get("/ready")
    assert status == 503 and "no decode worker" in answer["reasons"][0]
    await r.prefill()
    assert (await r.get("/ready"))[0] == 503
    decode = await r.decode()
    assert (await r.get("/ready"))[0] == 200
    decode.state = "draining"
    await decode.beat()
    await until(lambda: r.gateway.not_ready(), "draining to be heard")
    assert (await r.get("/health"))[0] == 200


async def test_stopped_worker_is_forgotten(r: Rig) -> None:
    decode = await r.decode()
    await decode.die()
    decode.state = "stopped"
    await decode.beat()
    await until(lambda: not r.gateway.fleet.knows("decode-1"), "the worker to be forgotten")


async def test_worker_with_another_model_is_refused(r: Rig) -> None:
    foreign = FakeWorker(r.bus, "decode-x", "decode")
    foreign.model_fingerprint = "0" * 64
    r.workers.append(await foreign.start())
    await until(lambda: r.gateway.fleet.refusal("decode-x"), "the refusal")
    status, answer = await r.get("/ready")
    assert status == 503 and any("decode-x" in reason for reason in answer["reasons"])
    await r.coordinator(place("decode-x"))
    assert (await r.post(CHAT, chat()))[0] == 503
    decode = await r.decode()
    decode.say("Hello")
    for _ in range(5):
        assert (await r.post(CHAT, chat()))[0] == 200
    assert foreign.requests == [] and len(decode.requests) == 5


async def test_worker_with_another_layout_is_refused(r: Rig) -> None:
    await r.decode()
    other = FakeWorker(r.bus, "decode-2", "decode")
    other.layout = "layout-2"
    r.workers.append(await other.start())
    await until(lambda: r.gateway.fleet.refusal("decode-2"), "the refusal")
    assert r.gateway.fleet.refusal("decode-1") == ""


async def test_status(r: Rig) -> None:
    worker = await r.decode()
    worker.behaviour = hang
    asking = asyncio.create_task(r.post(CHAT, chat()))
    await until(lambda: worker.requests, "the request")
    status = await r.bus.request(subjects.STATUS, StatusRequest(), ServiceStatus, timeout_s=5)
    assert status.service == "gateway" and status.state == "ready" and status.inflight == 1
    assert status.address == r.url and status.pid == os.getpid() and status.model == MODEL
    asking.cancel()


# ---------------------------------------------------------------- metrics


def series(text: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, str(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def metrics(r: Rig) -> dict[tuple[str, str], float]:
    async with r.session.get(r.url + "/metrics") as response:
        assert response.status == 200
        return series(await response.text())


async def test_series_do_not_grow_with_what_clients_send(r: Rig) -> None:
    worker = await r.decode()

    async def batch(start: int, count: int) -> None:
        for n in range(start, start + count):
            await r.post(CHAT, chat(user=f"user-{n}", max_tokens=1), headers={"x-request-id": f"id-{n}"})
            await r.post(CHAT, {**chat(), "model": f"bogus-{n}"})
            await r.get(f"/v1/models/m-{n}")
            await r.get(f"/nowhere/{n}")

    await batch(0, 3)
    await metrics(r)  # itself a request that is counted
    before = await metrics(r)
    await batch(3, 250)
    after = await metrics(r)
    assert before.keys() == after.keys()
    assert (
        worker.requests
        and sum(value for (name, _), value in after.items() if "http_requests_total" in name) > 1000
    )


async def test_metrics_count_what_happened(r: Rig) -> None:
    worker = await r.decode()
    worker.say("Hello, world")
    worker.step_s = 0.01
    await r.post(CHAT, chat())
    values = await metrics(r)

    def value(name: str, *labels: str) -> float:
        return sum(
            v for (n, text), v in values.items() if n == name and all(label in text for label in labels)
        )

    assert value("gen_ai_server_request_duration_seconds_count", "chat", "ok") == 1
    assert value("gen_ai_server_time_to_first_token_seconds_count", "chat") == 1
    assert value("gen_ai_server_time_per_output_token_seconds_count", "chat") == 1
    assert value("baton_gateway_tokens_total", "prompt") == 31
    assert value("baton_gateway_inflight_requests") == 0
    assert value("baton_gateway_workers", "decode") == 1


# ---------------------------------------------------------------- traces


async def test_one_root_with_the_clients_trace_across_a_retry(r: Rig) -> None:
    first, second, prefill = await r.decode("decode-1"), await r.decode("decode-2"), await r.prefill()
    await r.coordinator(place("decode-1", "prefill-1"))

    async def fail(worker: FakeWorker, request: Generate) -> None:
        await worker.fail(request, Code.KV_UNAVAILABLE, retryable=True)

    first.behaviour = fail
    second.say("Hello")
    second.cached_tokens = 16
    trace_id, parent_id = "a" * 32, "b" * 16
    status, _ = await r.post(CHAT, chat(), headers={"traceparent": f"00-{trace_id}-{parent_id}-01"})
    assert status == 200
    spans = r.spans
    assert {f"{span.context.trace_id:032x}" for span in spans} == {trace_id}
    (root,) = [span for span in spans if span.name == "request"]
    assert f"{root.parent.span_id:016x}" == parent_id
    others = [span for span in spans if span is not root]
    assert all(span.parent.span_id == root.context.span_id for span in others)
    assert [span.name for span in others] == ["tokenize", "route", "route"]
    assert [span.attributes["baton.attempt"] for span in others[1:]] == [1, 2]
    assert root.attributes["gen_ai.provider.name"] == "baton"
    assert root.attributes["gen_ai.request.model"] == MODEL
    assert root.attributes["gen_ai.usage.input_tokens"] == 31
    assert root.attributes["gen_ai.usage.cache_read.input_tokens"] == 16
    assert root.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert root.attributes["baton.attempts"] == 2 and root.attributes["baton.ttft_ms"] > 0
    for worker in (first, second, prefill):
        for incoming in worker.contexts:
            (header,) = incoming.context.values()
            assert header.get_span_context().trace_id == int(trace_id, 16)
            assert header.get_span_context().span_id == root.context.span_id


async def test_phases_of_the_gateway_leave_no_hole(r: Rig) -> None:
    decode, prefill = await r.decode(), await r.prefill()
    decode.say("Hello")
    await r.coordinator(place("decode-1", "prefill-1"))
    await r.post(CHAT, chat())
    spans = {span.name: span for span in r.spans}
    root, tokenize, route = spans["request"], spans["tokenize"], spans["route"]
    assert tokenize.start_time == root.start_time
    assert 0 <= route.start_time - tokenize.end_time < 5_000_000  # ns
    assert route.end_time == prefill.requests[0].sent_ns  # where the worker's own spans begin


async def test_the_first_token_s_way_to_the_client_is_a_phase_too(r: Rig) -> None:
    decode = await r.decode()
    sent_ns = 0

    async def behave(me: FakeWorker, request: Generate) -> None:
        nonlocal sent_ns
        sent_ns = time.time_ns()
        await me.tokens(request, 0, Token(id=33203), sent_ns=sent_ns)
        await me.finish(request, "length", 1)

    decode.behaviour = behave
    await r.post(CHAT, chat())
    spans = {span.name: span for span in r.spans}
    root, deliver = spans["request"], spans["deliver"]
    ttft_ns = root.attributes["baton.ttft_ms"] * 1e6
    assert deliver.start_time == sent_ns
    assert abs(deliver.end_time - root.start_time - ttft_ns) < 1000


async def test_ttft_counts_every_wait_and_is_what_the_client_sees(r: Rig) -> None:
    decode, _ = await r.decode(), await r.prefill()

    async def slow(worker: FakeWorker, request: Generate) -> None:
        await asyncio.sleep(0.5)  # 300 ms in a queue, 200 ms of transfer
        await emit_script(worker, request)

    decode.behaviour = slow
    decode.say("Hello")
    started_s = time.monotonic()
    async with r.session.post(r.url + CHAT, json=chat(stream=True)) as response:
        text = ""
        async for chunk in response.content.iter_any():
            text += chunk.decode()
            if "Hello" in text:
                break
        client_ms = (time.monotonic() - started_s) * 1e3
        await response.read()
    await r.is_idle()
    (root,) = [span for span in r.spans if span.name == "request"]
    ttft_ms = root.attributes["baton.ttft_ms"]
    assert 500 <= ttft_ms <= client_ms and client_ms - ttft_ms < 250


async def test_ttft_needs_text(r: Rig) -> None:
    worker = await r.decode()
    worker.script = [Token(id=2)]  # an end, and nothing before it
    _, answer = await r.post(CHAT, chat())
    assert (
        answer["choices"][0]["message"]["content"] == "" and answer["choices"][0]["finish_reason"] == "stop"
    )
    worker.behaviour = hang
    asking = asyncio.create_task(r.post(CHAT, chat(stream=True)))
    await until(lambda: len(worker.requests) == 2, "the second request")
    asking.cancel()
    await r.is_idle()
    roots = [span for span in r.spans if span.name == "request"]
    assert [root.attributes["baton.outcome"] for root in roots] == ["ok", "cancelled"]
    assert all("baton.ttft_ms" not in root.attributes for root in roots)
    values = await metrics(r)
    assert not [name for name, _ in values if "time_to_first_token_seconds_count" in name]


# ---------------------------------------------------------------- draining


async def test_drain_finishes_what_runs_and_refuses_what_comes(r: Rig) -> None:
    worker = await r.decode()
    worker.say("Hello, world")
    worker.step_s = 0.1
    running = asyncio.create_task(r.events(CHAT, chat()))
    await until(lambda: worker.requests, "the request")
    draining = asyncio.create_task(r.gateway.drain())
    await until(lambda: r.gateway.admission.draining, "the drain")
    status, answer = await r.get("/ready")
    assert status == 503 and "shutting down" in answer["reasons"][0]
    status, answer = await r.post(CHAT, chat())
    assert status == 503 and answer["error"]["code"] == "draining"
    assert (await running)[-1] == "[DONE]"
    await draining


@pytest.mark.parametrize("stream", [False, True])
async def test_what_outlives_the_drain_deadline_is_told(nats_url: str, tmp_path: Path, stream: bool) -> None:  # noqa: F811
    async with rig(nats_url, tmp_path, drain_timeout_s=0.2) as made:
        worker = await made.decode()
        worker.script = [Token(id=57)] * 5000
        worker.step_s = 0.02
        asking = made.events(CHAT, chat()) if stream else made.post(CHAT, chat())
        running = asyncio.create_task(asking)
        await until(lambda: worker.requests, "the request")
        await asyncio.sleep(0.1)
        await made.gateway.drain()
        result: Any = await running
        error = result[-1]["error"] if stream else result[1]["error"]
        assert error["code"] == "draining"
        await until(lambda: worker.aborts, "abort")


async def test_gateway_ends_when_one_of_its_own_tasks_does(r: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(now_s: float) -> None:
        raise ZeroDivisionError

    running = asyncio.create_task(r.gateway.run(asyncio.Event()))
    monkeypatch.setattr(r.gateway.fleet, "check", broken)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(running, 10)


# ---------------------------------------------------------------- the process


def start_gateway(nats: str, state_dir: Path, **environ: str) -> subprocess.Popen[bytes]:
    settings = {"NATS_URL": nats, "STATE_DIR": str(state_dir), "PORT": "0", "INSTANCE_ID": "gw-1"} | environ
    return subprocess.Popen(
        [sys.executable, "-m", "services.gateway"],
        cwd=ROOT,
        env={**os.environ, **{f"BATON_{name}": value for name, value in settings.items()}},
        stderr=subprocess.PIPE,
    )


async def wait_for(process: subprocess.Popen[bytes]) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and log lines."""
    _, logs = await asyncio.to_thread(process.communicate, timeout=30)
    return process.returncode, [json.loads(line) for line in logs.splitlines()]


async def address_of(bus: Bus) -> str:
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        for status in await bus.gather(subjects.STATUS, StatusRequest(), ServiceStatus, window_s=0.2):
            if status.address is not None:
                return status.address
        await asyncio.sleep(0.05)
    raise AssertionError("the gateway did not come up")


async def test_process_serves_drains_on_sigterm_and_exits_clean(nats_url: str, tmp_path: Path) -> None:  # noqa: F811
    process = start_gateway(nats_url, tmp_path, SERVED_NAME=MODEL)
    try:
        async with await Bus.connect(nats_url, "workers") as bus, aiohttp.ClientSession() as session:
            worker = FakeWorker(bus, "decode-1", "decode")
            url = await address_of(bus)
            worker.model_fingerprint = await fingerprint(tmp_path)
            worker.say("Hello, world")
            await worker.start()
            await ready(session, url)
            # A client that goes away, in the event loop that production runs.
            worker.behaviour = hang
            asking = asyncio.create_task(post_and_read(url))
            await until(lambda: worker.requests, "the request")
            asking.cancel()
            await until(lambda: worker.is_aborted(worker.requests[0]), "abort")
            # A stream that runs when the signal comes.
            worker.behaviour = emit_script
            worker.step_s = 0.2
            async with session.post(url + CHAT, json=chat(stream=True)) as response:
                process.send_signal(signal.SIGTERM)
                events = parse_events(await response.text())
            assert events[-1] == "[DONE]"
            await worker.die()
        status, logs = await wait_for(process)
        assert status == 0
        assert {"serving", "request", "draining"} <= {line["event"] for line in logs}
        request = next(line for line in logs if line["event"] == "request")
        assert request["trace_id"] and request["request_id"]
        assert [path for path in (tmp_path / "traces").rglob("*") if path.is_file()]
    finally:
        process.kill()
        process.wait(timeout=10)


async def fingerprint(state_dir: Path) -> str:
    from libs.checkpoint.open import open_checkpoint, resolve_model

    checkpoint = open_checkpoint(resolve_model("smollm2"))
    return await asyncio.to_thread(checkpoint.fingerprint, state_dir / "fingerprints")


async def ready(session: aiohttp.ClientSession, url: str) -> None:
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        async with session.get(url + "/ready") as response:
            if response.status == 200:
                return
        await asyncio.sleep(0.02)
    raise AssertionError("never ready")


async def post_and_read(url: str) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + CHAT, json=chat(stream=True)) as response,
    ):
        await response.read()


@pytest.mark.parametrize(
    ("environ", "word"),
    [({"MODEL": "/nowhere/m.gguf"}, "/nowhere/m.gguf"), ({"HOST": "192.0.2.1"}, "192.0.2.1")],
)
async def test_unusable_settings_are_status_2_and_one_line(
    nats_url: str,  # noqa: F811
    tmp_path: Path,
    environ: dict[str, str],
    word: str,
) -> None:
    status, logs = await wait_for(start_gateway(nats_url, tmp_path, **environ))
    assert status == 2
    assert any(word in line.get("error", "") for line in logs) and not any(
        "exception" in line for line in logs
    )


def test_no_torch_is_loaded() -> None:
    code = "import sys, services.gateway.__main__; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
