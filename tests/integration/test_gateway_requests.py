"""One request's life against scripted workers: placed, submitted, retried, cancelled, timed out, always ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from libs.engine.kv.names import block_names
from libs.wire.errors import Code, RequestRefused
from libs.wire.messages import Cached, Generate, OfferFailed, Prefill, Source, Token
from services.gateway import answering
from tests.gateway_rig import (
    BLOCK,
    ROOT_NAME,
    FakeWorker,
    Rig,
    chat,
    completion,
    emit_script,
    hang,
    parse_events,
    place,
    rig,
    until,
)
from tests.natsd import nats_url  # noqa: F401 (fixture)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
OVERLOADED = RequestRefused(Code.OVERLOADED, "full", retryable=True, retry_after_s=7.0)


@pytest.fixture
async def r(nats_url: str, tmp_path: Path) -> AsyncIterator[Rig]:  # noqa: F811
    async with rig(nats_url, tmp_path) as made:
        yield made


def content(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


# ---------------------------------------------------------------- placement


async def test_decode_is_asked_before_prefill_and_both_get_the_placement(r: Rig) -> None:
    decode, prefill = await r.decode(), await r.prefill()
    decode.say("Hello")
    sources = (Source(worker_id="decode-9", num_blocks=2),)
    coordinator = await r.coordinator(
        place("decode-1", "prefill-1", prefill_sources=sources, prefill_hit_blocks=2)
    )
    prompt = list(range(100, 100 + 3 * BLOCK + 5))
    status, _ = await r.post(COMPLETIONS, completion(prompt, max_tokens=5))
    assert status == 200
    (route,) = coordinator.routes
    assert route.names == block_names(ROOT_NAME, prompt, BLOCK) and route.num_tokens == len(prompt)
    (generate,), (asked,) = decode.requests, prefill.requests
    assert isinstance(generate, Generate) and isinstance(asked, Prefill)
    assert generate.remote_prefill and generate.sources == () and asked.sources == sources
    assert asked.decode_worker == "decode-1" and asked.sent_ns >= generate.sent_ns
    assert generate.prompt == asked.prompt == tuple(prompt)
    await until(lambda: coordinator.done == [route.request_id], "Done")
    assert decode.aborts == prefill.aborts == []


async def test_without_coordinator_a_queue_group_serves(r: Rig) -> None:
    decode = await r.decode()
    decode.say("Hello")
    status, answer = await r.post(CHAT, chat())
    assert (status, content(answer)) == (200, "Hello")
    assert isinstance(decode.requests[0], Generate) and not decode.requests[0].remote_prefill
    prefill = await r.prefill()
    assert (await r.post(CHAT, chat()))[0] == 200
    assert decode.requests[1].remote_prefill and len(prefill.requests) == 1
    assert prefill.requests[0].decode_worker == "decode-1"


async def test_silent_coordinator_delays_but_does_not_stop(r: Rig) -> None:
    decode = await r.decode()
    decode.say("Hello")
    coordinator = await r.coordinator(place("decode-1"))
    coordinator.placement = None  # gets the question, never answers
    status, answer = await r.post(CHAT, chat())
    assert (status, content(answer)) == (200, "Hello") and len(coordinator.routes) == 1


async def test_placement_on_an_unknown_worker_is_not_followed(r: Rig) -> None:
    decode = await r.decode()
    decode.say("Hello")
    await r.coordinator(place("decode-gone", "prefill-gone"))
    status, answer = await r.post(CHAT, chat())
    assert (status, content(answer)) == (200, "Hello")


async def test_no_worker_is_503_with_retry_after(r: Rig) -> None:
    async with r.session.post(r.url + CHAT, json=chat(stream=True)) as response:
        assert response.status == 503 and int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["code"] == "no_worker"
    await r.is_idle()


# ---------------------------------------------------------------- prefill fails: decode computes


@pytest.mark.parametrize("how", ["refuses", "nobody"])
async def test_decode_is_told_when_no_prefill_worker_takes_the_prompt(r: Rig, how: str) -> None:
    decode, prefill = await r.decode(), await r.prefill()
    decode.behaviour = compute_when_told
    decode.say("Hello")
    await r.coordinator(place("decode-1", "prefill-1"))
    if how == "refuses":
        prefill.refusal = RequestRefused(Code.DRAINING, "leaving", retryable=True)
    else:
        await prefill.die()
    status, answer = await r.post(CHAT, chat())
    assert (status, content(answer)) == (200, "Hello")
    (failed,) = decode.offers
    assert isinstance(failed, OfferFailed) and failed.attempt == 1


async def test_a_prefill_worker_with_too_much_to_do_is_429_and_no_work_for_decode(r: Rig) -> None:
    decode, prefill = await r.decode(), await r.prefill()
    await r.decode("decode-2")
    prefill.refusal = OVERLOADED
    await r.coordinator(place("decode-1", "prefill-1"))
    async with r.session.post(r.url + CHAT, json=chat()) as response:
        assert response.status == 429 and response.headers["Retry-After"] == "7"
    await until(lambda: decode.is_aborted(decode.requests[0]), "abort at decode")
    assert (len(decode.requests), len(prefill.requests), decode.offers) == (1, 1, [])


async def test_decode_is_told_when_the_prefill_worker_dies(r: Rig) -> None:
    decode, prefill = await r.decode(), await r.prefill()
    decode.behaviour = compute_when_told
    decode.say("Hello")
    await r.coordinator(place("decode-1", "prefill-1"))
    asking = asyncio.create_task(r.post(CHAT, chat()))
    await until(lambda: prefill.requests, "the prompt at prefill")
    await prefill.die()
    status, answer = await asking
    assert (status, content(answer)) == (200, "Hello")
    assert [type(offer) for offer in decode.offers] == [OfferFailed]


async def compute_when_told(worker: FakeWorker, request: Generate) -> None:
    await until(lambda: any(offer.request_id == request.request_id for offer in worker.offers), "OfferFailed")
    await emit_script(worker, request)


# ---------------------------------------------------------------- retries


async def test_refused_request_goes_to_another_worker(r: Rig) -> None:
    first, second = await r.decode("decode-1"), await r.decode("decode-2")
    first.refusal = OVERLOADED
    second.say("Hello")
    coordinator = await r.coordinator(place("decode-1"))
    status, answer = await r.post(CHAT, chat())
    assert (status, content(answer)) == (200, "Hello")
    assert [route.exclude for route in coordinator.routes] == [(), ("decode-1",)]
    assert second.requests[0].attempt == 2 and first.aborts == []
    await until(lambda: coordinator.done, "Done")


async def test_overload_everywhere_is_429_with_the_workers_retry_after(r: Rig) -> None:
    (await r.decode()).refusal = OVERLOADED
    async with r.session.post(r.url + CHAT, json=chat()) as response:
        assert response.status == 429 and response.headers["Retry-After"] == "7"
        assert (await response.json())["error"]["code"] == "overloaded"


async def test_failure_before_the_first_token_is_retried_and_its_rest_aborted(r: Rig) -> None:
    first, second, prefill = await r.decode("decode-1"), await r.decode("decode-2"), await r.prefill()
    await r.coordinator(place("decode-1", "prefill-1"))
    second.say("Hello")

    async def fail(worker: FakeWorker, request: Generate) -> None:
        await worker.fail(request, Code.KV_UNAVAILABLE, retryable=True)
        await asyncio.sleep(0.05)
        await worker.tokens(request, 0, Token(id=57))  # of a void attempt: must not show

    first.behaviour = fail
    status, answer = await r.post(CHAT, chat())
    assert (status, content(answer)) == (200, "Hello")
    await until(lambda: first.aborts and prefill.aborts, "aborts of the first attempt")
    assert {abort.attempt for abort in first.aborts + prefill.aborts} == {1}
    assert second.requests[0].attempt == 2 and second.aborts == []


async def test_at_most_three_attempts(r: Rig) -> None:
    workers = [await r.decode(f"decode-{n}") for n in range(5)]

    async def fail(worker: FakeWorker, request: Generate) -> None:
        await worker.fail(request, Code.KV_UNAVAILABLE, retryable=True)

    for worker in workers:
        worker.behaviour = fail
    status, answer = await r.post(CHAT, chat())
    assert status == 503 and answer["error"]["code"] == "kv_unavailable"
    asked = [request for worker in workers for request in worker.requests]
    assert sorted(request.attempt for request in asked) == [1, 2, 3]
    assert len({worker.worker_id for worker in workers if worker.requests}) == 3


@pytest.mark.parametrize(
    ("code", "status"), [(Code.CAPACITY_EXCEEDED, 400), (Code.BAD_REQUEST, 400), (Code.INTERNAL, 500)]
)
async def test_final_refusals_are_not_retried(r: Rig, code: Code, status: int) -> None:
    worker = await r.decode()
    await r.decode("decode-2")
    worker.refusal = RequestRefused(code, "secret path /x", retryable=False)
    await r.coordinator(place("decode-1"))
    got, answer = await r.post(CHAT, chat())
    assert got == status and answer["error"]["code"] == code
    assert ("secret" in answer["error"]["message"]) == (status == 400)
    assert len(worker.requests) == 1


async def test_worker_that_never_answers_is_given_up_and_told(r: Rig) -> None:
    stopped, second = await r.decode("decode-1"), await r.decode("decode-2")
    stopped.answers = False
    second.say("Hello")
    await r.coordinator(place("decode-1"))
    status, answer = await r.post(CHAT, chat())
    assert (status, content(answer)) == (200, "Hello")
    await until(lambda: stopped.is_aborted(stopped.requests[0]), "abort")


async def test_worker_that_dies_before_the_first_token_is_replaced(r: Rig) -> None:
    first, second = await r.decode("decode-1"), await r.decode("decode-2")
    first.behaviour = hang
    second.say("Hello")
    await r.coordinator(place("decode-1"))
    asking = asyncio.create_task(r.post(CHAT, chat()))
    await until(lambda: first.requests, "the request at decode-1")
    await first.die()
    status, answer = await asking
    assert (status, content(answer)) == (200, "Hello")


async def test_restarted_worker_has_lost_its_requests_and_is_given_them_again(r: Rig) -> None:
    worker = await r.decode()
    worker.behaviour = hang
    asking = asyncio.create_task(r.post(CHAT, chat()))
    await until(lambda: worker.requests, "the request")
    worker.say("Hello")
    worker.behaviour = emit_script
    worker.epoch += 1
    status, answer = await asking
    assert (status, content(answer)) == (200, "Hello")
    assert len(worker.requests) == 2


# ---------------------------------------------------------------- failures in the middle


async def two_chunks(worker: FakeWorker, request: Generate) -> None:
    await worker.tokens(request, 0, Token(id=19556))
    await asyncio.sleep(0.02)
    await worker.tokens(request, 1, Token(id=28))


@pytest.mark.parametrize("how", ["fails", "dies"])
async def test_failure_in_the_middle_is_an_error_frame_and_an_end(r: Rig, how: str) -> None:
    worker = await r.decode()

    async def behave(me: FakeWorker, request: Generate) -> None:
        await two_chunks(me, request)
        if how == "fails":
            await me.fail(request, Code.KV_UNAVAILABLE, retryable=True)

    worker.behaviour = behave
    async with r.session.post(r.url + CHAT, json=chat(stream=True)) as response:
        assert response.status == 200
        text, told_s = "", None
        async for chunk in response.content.iter_any():
            text += chunk.decode()
            if how == "dies" and "Hello" in text and worker.requests:
                await worker.die()
            if '"error"' in text and told_s is None:
                told_s = time.monotonic()
        assert told_s is not None and time.monotonic() - told_s < 1.0
    events = parse_events(text)
    assert events[-1]["error"]["code"] == ("kv_unavailable" if how == "fails" else "worker_lost")
    assert "[DONE]" not in events
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert len(worker.requests) == 1
    await r.is_idle()


async def test_failure_in_the_middle_of_a_whole_answer_is_a_status(r: Rig) -> None:
    worker = await r.decode()

    async def behave(me: FakeWorker, request: Generate) -> None:
        await two_chunks(me, request)
        await me.fail(request, Code.KV_UNAVAILABLE, retryable=True)

    worker.behaviour = behave
    status, answer = await r.post(CHAT, chat())
    assert status == 503 and answer["error"]["code"] == "kv_unavailable" and len(worker.requests) == 1


async def test_duplicates_are_harmless_and_gaps_are_not(r: Rig) -> None:
    worker = await r.decode()
    ids = [33203, 23960, 57, 58]

    async def repeat(me: FakeWorker, request: Generate) -> None:
        tokens = [Token(id=token_id) for token_id in ids]
        await me.tokens(request, 0, *tokens[:2])
        await me.tokens(request, 1, *tokens[1:3])
        await me.tokens(request, 0, *tokens[:1])
        await me.tokens(request, 3, tokens[3])
        await me.finish(request, "length", 4)

    async def skip(me: FakeWorker, request: Generate) -> None:
        await me.tokens(request, 0, Token(id=ids[0]))
        await me.tokens(request, 2, Token(id=ids[2]))
        await me.finish(request, "length", 3)

    async def lose_the_last(me: FakeWorker, request: Generate) -> None:
        await me.tokens(request, 0, Token(id=ids[0]))
        await me.finish(request, "length", 2)

    worker.behaviour = repeat
    status, answer = await r.post(CHAT, chat(max_tokens=4))
    assert (status, content(answer)) == (200, "DEFGHIJ") and answer["usage"]["completion_tokens"] == 4
    for behaviour in (skip, lose_the_last):
        worker.behaviour = behaviour
        status, answer = await r.post(CHAT, chat(max_tokens=4))
        assert status == 503 and answer["error"]["code"] == "worker_lost"
    await until(lambda: len(worker.aborts) >= 1, "abort of the damaged answer")


# ---------------------------------------------------------------- deadlines


@pytest.mark.parametrize("chunks", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_deadline(nats_url: str, tmp_path: Path, stream: bool, chunks: int) -> None:  # noqa: F811
    async with rig(nats_url, tmp_path, request_timeout_s=0.6) as made:
        worker, prefill = await made.decode(), await made.prefill()
        worker.behaviour = two_chunks if chunks else hang
        if stream and chunks:
            events = await made.events(CHAT, chat())
            assert events[-1]["error"]["code"] == "deadline_exceeded"
        else:
            status, answer = await made.post(CHAT, chat(stream=stream))
            assert status == 504 and answer["error"]["code"] == "deadline_exceeded"
        await until(lambda: worker.aborts and prefill.aborts, "aborts on both sides")
        await made.is_idle()


async def test_stop_string_ends_the_work_on_both_sides(r: Rig) -> None:
    decode, prefill = await r.decode(), await r.prefill()
    coordinator = await r.coordinator(place("decode-1", "prefill-1"))
    decode.script = [Token(id=token_id) for token_id in [33203, 23960] + [57] * 500]
    decode.step_s = 0.005
    status, answer = await r.post(CHAT, chat(stop=["FG"]))
    assert (status, content(answer)) == (200, "DE") and answer["choices"][0]["finish_reason"] == "stop"
    await until(lambda: decode.aborts and prefill.aborts and coordinator.done, "aborts and Done")


async def test_cached_tokens_of_an_answer_that_a_stop_string_ended(r: Rig) -> None:
    decode = await r.decode()

    async def behave(me: FakeWorker, request: Generate) -> None:
        await me.tokens(request, 0, Token(id=33203), cached=Cached(tokens=16))

    decode.behaviour = behave
    _, answer = await r.post(CHAT, chat(stop=["EF"]))
    assert content(answer) == "D" and answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


# ---------------------------------------------------------------- clients that go away


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["route", "submit", "queue", "decode"])
async def test_client_gone_is_noticed_in_every_phase(r: Rig, phase: str, stream: bool) -> None:
    decode, prefill = await r.decode(), await r.prefill()
    coordinator = await r.coordinator(place("decode-1", "prefill-1"))
    decode.script = [Token(id=57)] * 2000
    decode.step_s = 0.01
    if phase == "route":
        coordinator.placement = None
    elif phase == "submit":
        decode.answers = False
    elif phase == "queue":
        decode.behaviour = hang
    asking = asyncio.create_task(read_all(r, chat(stream=stream)))
    if phase == "route":
        await until(lambda: coordinator.routes, "route")
    else:
        await until(lambda: decode.requests and (phase == "submit" or prefill.requests), "submission")
        await asyncio.sleep(0.05)
    assert r.gateway.admission.inflight == 1
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    gone_s = time.monotonic()
    await r.is_idle()
    if phase != "route":
        await until(lambda: decode.is_aborted(decode.requests[0]), "abort at decode")
    if phase in ("queue", "decode"):
        await until(lambda: prefill.aborts, "abort at prefill")
    await until(lambda: len(coordinator.done) == 1, "Done")
    assert time.monotonic() - gone_s < 2.0


@pytest.mark.parametrize("stream", [False, True])
async def test_client_gone_before_its_handler_began_is_noticed(r: Rig, stream: bool) -> None:
    """Request and hang-up arrive together: there is no handler yet that could be cancelled."""
    decode = await r.decode()
    decode.behaviour = hang
    url = urlsplit(r.url)
    body = json.dumps(chat(stream=stream)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    # Blocking, in the server's own thread: it sees nothing before all of it has happened.
    with socket.create_connection((str(url.hostname), url.port or 80)) as client:
        client.sendall(head.encode() + body)
    await asyncio.sleep(0.1)
    gone_s = time.monotonic()
    await r.is_idle()
    for request in decode.requests:
        await until(lambda request=request: decode.is_aborted(request), "abort at decode")
    assert time.monotonic() - gone_s < 2.0


async def read_all(r: Rig, body: dict[str, Any]) -> None:
    # A session of its own: its connections end with it.
    async with aiohttp.ClientSession() as session, session.post(r.url + CHAT, json=body) as response:
        await response.read()


async def test_a_hundred_cancels_leave_nothing(r: Rig) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    decode, _ = await r.decode(), await r.prefill()
    coordinator = await r.coordinator(place("decode-1", "prefill-1"))
    decode.script = [Token(id=57)] * 30
    decode.step_s = 0.002

    async def one() -> None:
        body = chat("hi " * chance.choice([1, 10, 1500]), stream=chance.random() < 0.5, max_tokens=30)
        asking = asyncio.create_task(read_all(r, body))
        await asyncio.sleep(chance.random() * 0.12)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    for _ in range(10):
        await asyncio.gather(*(one() for _ in range(10)))
    await r.is_idle()
    assert len(coordinator.routes) > 10  # else nothing was tested
    routed = sorted(route.request_id for route in coordinator.routes)
    await until(lambda: sorted(coordinator.done) == routed, "one Done for each route")
    accepted = {request.request_id for request in decode.requests}
    ended = {abort.request_id for abort in decode.aborts}
    finished = accepted - ended
    spans = {span.attributes["baton.request_id"]: span for span in r.spans if span.name == "request"}
    # What was not aborted was answered in full, even if its client left before the last byte.
    reasons = [spans[request_id].attributes.get("gen_ai.response.finish_reasons") for request_id in finished]
    assert all(reason == ("length",) for reason in reasons)
    assert (await r.post(CHAT, chat(max_tokens=1)))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("placed", [False, True])
async def test_cancel_at_every_await(
    r: Rig, monkeypatch: pytest.MonkeyPatch, placed: bool, stream: bool
) -> None:
    """The handler is cancelled at its n-th suspension, for every n until it gets through."""
    decode, prefill = await r.decode(), await r.prefill()
    coordinator = await r.coordinator(place("decode-1" if placed else "unknown", "prefill-1"))
    decode.script = [Token(id=57)] * 3
    decode.step_s = 0.02
    body = completion([5] * 40, max_tokens=3, stream=stream)
    handle = answering.Answering.handle
    step, ends = 0, ["cancelled"]

    async def stepped(*arguments: Any) -> Any:
        try:
            response = await _CancelAt(handle(*arguments), step)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        ends.append("through")
        return response

    monkeypatch.setattr(answering.Answering, "handle", stepped)
    while ends[-1] == "cancelled":
        async with aiohttp.ClientSession() as session:
            with contextlib.suppress(aiohttp.ClientError):
                await (await session.post(r.url + COMPLETIONS, json=body)).read()
        await r.is_idle()
        step += 1
    assert step > 6 and prefill.requests, "it suspends for route, two submissions and each token"
    routed = sorted(route.request_id for route in coordinator.routes)
    await until(lambda: sorted(coordinator.done) == routed, "one Done for each route")
    running = [request for request in decode.requests if not decode.is_aborted(request)]
    assert len(running) <= 1  # the one that got through


class _CancelAt:
    """Runs a coroutine, and cancels its task at the coroutine's n-th suspension."""

    def __init__(self, coroutine: Any, step: int) -> None:
        self._coroutine = coroutine
        self._step = step

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self._coroutine.__await__()
        resume: Callable[[], Any] = partial(next, inner)
        for seen in itertools.count():
            try:
                waited = resume()
            except StopIteration as result:
                return result.value
            if seen == self._step:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()  # takes effect where the coroutine just suspended
            try:
                value = yield waited
                resume = partial(inner.send, value)
            except BaseException as error:
                resume = partial(inner.throw, error)
        return None


# ---------------------------------------------------------------- bounds


async def test_beyond_the_limit_exactly_the_rest_is_refused(nats_url: str, tmp_path: Path) -> None:  # noqa: F811
    async with rig(nats_url, tmp_path, max_inflight=5) as made:
        worker = await made.decode()
        worker.behaviour = hang
        held = [asyncio.create_task(read_all(made, chat())) for _ in range(5)]
        await until(lambda: made.gateway.admission.inflight == 5, "a full gateway")
        for _ in range(4):
            async with made.session.post(made.url + CHAT, json=chat()) as response:
                assert response.status == 429 and int(response.headers["Retry-After"]) >= 1
                assert (await response.json())["error"]["code"] == "overloaded"
        assert made.gateway.admission.inflight == 5
        held.pop().cancel()
        await until(lambda: made.gateway.admission.inflight == 4, "a slot given back")
        worker.behaviour = emit_script
        assert (await made.post(CHAT, chat()))[0] == 200
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await made.is_idle()


async def test_a_burst_is_served_or_refused_and_nothing_hangs(nats_url: str, tmp_path: Path) -> None:  # noqa: F811
    async with rig(nats_url, tmp_path, max_inflight=8) as made:
        worker = await made.decode()
        worker.say("Hello")
        worker.step_s = 0.01
        results = await asyncio.gather(*(made.post(CHAT, chat()) for _ in range(30)))
        statuses = [status for status, _ in results]
        assert set(statuses) == {200, 429} and statuses.count(200) >= 8
        await made.is_idle()


async def test_silence_is_filled_with_comments(r: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "KEEPALIVE_S", 0.05)
    worker = await r.decode()
    worker.say("Hello")
    worker.step_s = 0.3
    async with r.session.post(r.url + CHAT, json=chat(stream=True)) as response:
        text = await response.text()
    assert text.count(": waiting\n\n") >= 2
    events = parse_events(text)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant" and events[-1] == "[DONE]"
