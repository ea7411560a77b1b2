"""A worker that dies in the middle of an answer: another goes on from it, and the client sees a pause. Row 46."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from libs.wire.messages import Cached, Generate, Source, Token
from tests.gateway_rig import FakeWorker, Rig, chat, emit_script, hang, place, rig, until
from tests.natsd import nats_url

__all__ = ["nats_url"]

CHAT = "/v1/chat/completions"
IDS = [33203, 23960, 57, 58]  # DEF GH I J


@pytest.fixture
async def r(nats_url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(nats_url, tmp_path) as made:
        yield made


def content(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def joined(events: list[Any]) -> str:
    return "".join(
        event["choices"][0]["delta"].get("content", "") for event in events[:-1] if event["choices"]
    )


def dies_after(count: int) -> Any:
    async def behave(me: FakeWorker, request: Generate) -> None:
        await me.tokens(request, 0, *(Token(id=i) for i in IDS[:count]), cached=Cached(tokens=5))
        await asyncio.sleep(0.05)
        me.die_soon()

    return behave


def cut_off_after(count: int) -> Any:
    """It has sent tokens, some of which were lost; and nothing reaches it any more."""

    async def behave(me: FakeWorker, request: Generate) -> None:
        await me.cut_off()
        await me.tokens(request, 0, *(Token(id=i) for i in IDS[:count]))
        await me.tokens(request, count + 1, Token(id=IDS[-1]))

    return behave


async def two(r: Rig, count: int) -> tuple[FakeWorker, FakeWorker]:
    """The first gets the request, and dies after `count` tokens."""
    first, second = await r.decode("decode-1"), await r.decode("decode-2")
    first.behaviour = dies_after(count)
    second.script = [Token(id=i) for i in IDS]
    await r.coordinator(place("decode-1"))
    return first, second


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_the_next_worker_goes_on_from_the_answer_so_far(r: Rig, count: int) -> None:
    first, second = await two(r, count)
    events = await r.events(CHAT, chat(max_tokens=4, stream_options={"include_usage": True}))
    assert events[-1] == "[DONE]" and joined(events) == "DEFGHIJ"
    before, after = first.requests[0], second.requests[0]
    assert isinstance(before, Generate) and isinstance(after, Generate)
    assert after.prompt == before.prompt + tuple(IDS[:count])
    assert (after.num_emitted, after.limits, after.attempt) == (count, before.limits, 2)
    usage = events[-2]["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (4, len(before.prompt))
    assert usage["prompt_tokens_details"]["cached_tokens"] == 5  # of the prompt, when it was first read
    await r.is_idle()


async def test_the_trace_says_why_there_was_another_attempt(r: Rig) -> None:
    await two(r, 2)
    await r.events(CHAT, chat(max_tokens=4))
    first, second = (dict(span.attributes or {}) for span in r.spans if span.name == "route")
    assert "baton.retry.cause" not in first
    assert str(second["baton.retry.cause"]).startswith("decode worker decode-1 was lost: silent for")
    assert second["baton.retry.tokens"] == 2


async def test_a_stop_string_that_straddles_the_cut_still_matches(r: Rig) -> None:
    await two(r, 2)
    status, answer = await r.post(CHAT, chat(max_tokens=4, stop="FGHI"))
    assert (status, content(answer), answer["choices"][0]["finish_reason"]) == (200, "DE", "stop")


async def test_logprobs_of_both_workers_are_those_of_one_answer(r: Rig) -> None:
    await two(r, 2)
    status, answer = await r.post(CHAT, chat(max_tokens=4, logprobs=True))
    entries = answer["choices"][0]["logprobs"]["content"] if status == 200 else []
    assert "".join(entry["token"] for entry in entries) == "DEFGHIJ"


async def test_lost_messages_are_asked_for_again_of_the_same_worker(r: Rig) -> None:
    worker = await r.decode()
    worker.script = [Token(id=i) for i in IDS]

    async def lossy(me: FakeWorker, request: Generate) -> None:
        if request.num_emitted:
            await emit_script(me, request)
            return
        await me.tokens(request, 0, Token(id=IDS[0]))
        await me.tokens(request, 2, Token(id=IDS[2]))

    worker.behaviour = lossy
    status, answer = await r.post(CHAT, chat(max_tokens=4))
    assert (status, content(answer)) == (200, "DEFGHIJ")
    await until(lambda: worker.is_aborted(worker.requests[0]), "abort of the attempt with the gap")


async def test_only_the_word_of_the_end_was_lost(r: Rig) -> None:
    worker = await r.decode()
    worker.behaviour = dies_after(4)
    status, answer = await r.post(CHAT, chat(max_tokens=4))
    assert (status, content(answer), answer["choices"][0]["finish_reason"]) == (200, "DEFGHIJ", "length")
    assert len(worker.requests) == 1


async def test_a_worker_that_comes_back_in_time_is_waited_for(nats_url: str, tmp_path: Path) -> None:
    async with rig(nats_url, tmp_path, recovery_s=20.0) as made:
        first = await made.decode()
        first.behaviour = dies_after(2)
        asking = asyncio.create_task(made.events(CHAT, chat(max_tokens=4)))
        await until(lambda: not made.gateway.fleet.serving("decode"), "the loss of the worker")
        await asyncio.sleep(0.3)
        again = FakeWorker(made.bus, "decode-1", "decode")
        again.epoch, again.script = 2, [Token(id=i) for i in IDS]
        made.workers.append(await again.start())
        events = await asking
        assert events[-1] == "[DONE]" and joined(events) == "DEFGHIJ"
        await made.is_idle()


async def test_a_client_that_leaves_while_nobody_is_there_leaves_nothing(
    nats_url: str, tmp_path: Path
) -> None:
    async with rig(nats_url, tmp_path, recovery_s=20.0) as made:
        first = await made.decode()
        first.behaviour = dies_after(2)
        asking = asyncio.create_task(made.events(CHAT, chat(max_tokens=4)))
        await until(lambda: not made.gateway.fleet.serving("decode"), "the loss of the worker")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await made.is_idle()


async def test_an_answer_is_continued_without_prefill_and_pulls_what_prefill_has(r: Rig) -> None:
    first, second = await r.decode("decode-1"), await r.decode("decode-2")
    await r.prefill()
    first.behaviour = dies_after(2)
    second.script = [Token(id=i) for i in IDS]
    coordinator = await r.coordinator(place("decode-1", "prefill-1"))
    asking = asyncio.create_task(r.post(CHAT, chat(max_tokens=4)))
    await until(lambda: first.requests, "the request")
    coordinator.placement = place("decode-2", "prefill-1", prefill_hit_blocks=3, store_blocks=2)
    status, answer = await asking
    assert (status, content(answer)) == (200, "DEFGHIJ")
    (request,) = second.requests
    assert isinstance(request, Generate) and not request.remote_prefill
    assert (request.sources, request.store_blocks) == ((Source(worker_id="prefill-1", num_blocks=3),), 2)


async def test_whoever_makes_no_progress_is_not_tried_for_ever(r: Rig) -> None:
    worker = await r.decode()

    async def gap(me: FakeWorker, request: Generate) -> None:
        await me.tokens(request, request.num_emitted + 1, Token(id=57))

    worker.behaviour = gap
    status, answer = await r.post(CHAT, chat(max_tokens=4))
    assert (status, answer["error"]["code"]) == (503, "worker_lost") and len(worker.requests) == 3
    worker.behaviour = hang
    await r.is_idle()


async def test_workers_that_beat_and_do_not_listen_are_waited_for(nats_url: str, tmp_path: Path) -> None:
    """After NATS was away, heartbeats and subscriptions come back one by one."""
    async with rig(nats_url, tmp_path, recovery_s=20.0) as made:
        first, second = await made.decode("decode-1"), await made.decode("decode-2")
        first.script = second.script = [Token(id=i) for i in IDS]
        first.behaviour = cut_off_after(2)
        await made.coordinator(place("decode-1"))
        await second.cut_off()
        asking = asyncio.create_task(made.events(CHAT, chat(max_tokens=4)))
        await until(lambda: first.requests, "the request")
        await asyncio.sleep(0.8)  # several times what three attempts take
        assert not asking.done()
        await second.listen()
        assert joined(await asking) == "DEFGHIJ"
        await made.is_idle()
