"""Small parts of the gateway: admission, limits, error bodies, slow clients."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from libs.service.telemetry import Telemetry
from libs.wire.errors import Code, MessageTooLarge, NoResponder, RequestRefused
from libs.wire.messages import Sampling
from services.gateway.admission import Admission
from services.gateway.api.completions import read_order
from services.gateway.api.errors import ApiError, from_failure, path_of
from services.gateway.job import Order
from services.gateway.offload import INLINE_WEIGHT, Offload
from services.gateway.prepare import Preparer
from services.gateway.sse import ClientGone, EventStream
from tests.gateway_rig import text_model

# ---------------------------------------------------------------- admission


async def test_slots_are_given_back_on_every_path() -> None:
    admission = Admission(2)
    with admission.slot(), admission.slot():
        with pytest.raises(RequestRefused) as refused, admission.slot():
            raise AssertionError("there was no slot")
        assert refused.value.code is Code.OVERLOADED and refused.value.retry_after_s
        assert admission.inflight == 2
    with pytest.raises(KeyError), admission.slot():
        raise KeyError
    assert admission.inflight == 0


async def test_drain_waits_and_refuses() -> None:
    admission = Admission(2)
    with admission.slot():
        assert not await admission.drain(0.01)
        with pytest.raises(RequestRefused) as refused, admission.slot():
            raise AssertionError("it drains")
        assert refused.value.code is Code.DRAINING
    assert await admission.drain(0.01)


# ---------------------------------------------------------------- limits


def order(max_tokens: int | None, **fields: Any) -> Order:
    defaults: dict[str, Any] = {
        "model": "m",
        "tokenize": lambda text: [1],
        "num_chars": 1,
        "prompt_param": "prompt",
        "max_tokens_param": "max_tokens",
        "sampling": Sampling(),
    }
    return Order(max_tokens=max_tokens, **(defaults | fields))


def preparer(default: int | None = None) -> Preparer:
    return Preparer(text_model(), Offload(), Telemetry("t", "t", InMemorySpanExporter()), default)


@pytest.mark.parametrize(
    ("prompt", "asked", "default", "got"),
    [(10, None, None, 90), (10, None, 20, 20), (95, None, 20, 5), (99, 1, None, 1), (99, None, None, 1),
     (10, 90, None, 90), (100, 0, None, 0), (10, 50, 20, 50)],
)  # fmt: skip
def test_limits_within_the_context(prompt: int, asked: int | None, default: int | None, got: int) -> None:
    assert preparer(default).limits(order(asked), prompt, 100).max_tokens == got


@pytest.mark.parametrize(
    ("prompt", "asked", "param"),
    [
        (100, 1, "prompt"),
        (100, None, "prompt"),
        (101, 0, "prompt"),
        (500, 7, "prompt"),
        (10, 91, "max_tokens"),
    ],
)
def test_beyond_the_context_is_an_error_with_counts(prompt: int, asked: int | None, param: str) -> None:
    with pytest.raises(ApiError) as error:
        preparer().limits(order(asked), prompt, 100)
    assert error.value.status == 400 and error.value.code == "context_length_exceeded"
    assert error.value.param == param
    assert str(prompt) in error.value.message and "100" in error.value.message


# ---------------------------------------------------------------- errors


def test_paths_are_written_as_in_javascript() -> None:
    assert path_of(("messages", 0, "content")) == "messages[0].content" and path_of(()) == ""


@pytest.mark.parametrize("code", list(Code))
def test_every_code_has_an_answer(code: Code) -> None:
    error = from_failure(RequestRefused(code, "text", retryable=False), "id-1")
    body = json.loads(error.body())["error"]
    assert set(body) == {"message", "type", "param", "code"} and body["code"] == code
    assert 400 <= error.status < 600
    assert ("Retry-After" in error.headers()) == (error.status in (429, 503))
    assert "id-1" in body["message"] if error.status == 500 else body["message"] == "text"


def test_retry_after_is_whole_seconds_of_at_least_one() -> None:
    for given, shown in ((0.2, "1"), (2.1, "3"), (None, "1")):
        refused = RequestRefused(Code.OVERLOADED, "", retryable=True, retry_after_s=given)
        assert from_failure(refused, "x").headers() == {"Retry-After": shown}


def test_bus_errors_have_answers_too() -> None:
    assert from_failure(NoResponder("s"), "x").status == 503
    assert from_failure(MessageTooLarge("s", 2, 1), "x").status == 400


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ("top_p=0", "top_k", 1),
        ("top_k=-1", "top_k", 0),
        ("seed=-1", "seed", 2**64 - 1),
        ("seed=5", "seed", 5),
    ],
)
def test_sampling_in_the_engines_terms(body: str, field: str, value: int) -> None:
    name, _, number = body.partition("=")
    made = read_order(json.dumps({"model": "m", "prompt": "x", name: int(number)}).encode())
    assert getattr(made.sampling, field) == value


# ---------------------------------------------------------------- offload


async def test_heavy_work_leaves_the_event_loop() -> None:
    offload = Offload()
    assert await offload.run(threading.get_ident, weight=INLINE_WEIGHT) == threading.get_ident()
    assert await offload.run(threading.get_ident, weight=INLINE_WEIGHT + 1) != threading.get_ident()
    offload.close()


# ---------------------------------------------------------------- slow clients


async def test_client_that_does_not_read_is_given_up() -> None:
    ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    async def handle(request: web.Request) -> web.StreamResponse:
        stream = EventStream(request, write_timeout_s=0.2)
        try:
            for _ in range(1000):
                await stream.send(b"x" * 100_000)
        except BaseException as error:
            ended.set_result(error)
            raise
        ended.set_result(None)
        return await stream.end()

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    try:
        assert isinstance(await asyncio.wait_for(ended, 10), ClientGone)
        assert reader
    finally:
        writer.close()
        await runner.cleanup()


async def test_stream_that_failed_closes_its_connection() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        stream = EventStream(request)
        await stream.send(b"data: 1\n\n")
        return await stream.end(failed=True)

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"data: 1" in await asyncio.wait_for(reader.read(), 5)  # to the end of the connection
        writer.close()
        async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}/") as response:
            assert await response.text() == "data: 1\n\n"
    finally:
        await runner.cleanup()
