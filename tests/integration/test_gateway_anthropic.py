"""Anthropic's own client against a gateway, with scripted workers."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from libs.wire.errors import Code, RequestRefused
from libs.wire.messages import Cached, Generate, Token
from tests.gateway_rig import MODEL, FakeWorker, Rig, emit_script, rig, text_model
from tests.natsd import nats_url

__all__ = ["nats_url"]

MESSAGES = "/v1/messages"
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def r(nats_url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(nats_url, tmp_path) as made:
        yield made


@pytest.fixture
async def client(r: Rig) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=r.url, api_key="none", max_retries=0) as made:
        yield made


async def events(r: Rig, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and data of a stream's events."""
    async with r.session.post(r.url + MESSAGES, json={**body, "stream": True}) as response:
        text = await response.text()
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found)
    return found


async def test_a_message(r: Rig, client: AsyncAnthropic) -> None:
    worker = await r.decode()
    worker.say("Hello")
    worker.cached_tokens = 8
    message = await client.messages.create(model=MODEL, max_tokens=20, messages=HI)
    assert [block.text for block in message.content if block.type == "text"] == ["Hello"]
    assert (message.role, message.model, message.stop_reason, message.stop_sequence) == (
        "assistant",
        MODEL,
        "end_turn",
        None,
    )
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (23, 8, 2)
    assert message.id.startswith("msg_") and message._request_id


async def test_a_stream_has_the_same_text_and_usage(r: Rig, client: AsyncAnthropic) -> None:
    worker = await r.decode()
    worker.say("Hello there")

    async def cached(me: FakeWorker, request: Generate) -> None:
        await me.tokens(request, 0, me.script[0], cached=Cached(tokens=8))
        await emit_script(me, request)

    worker.behaviour = cached
    async with client.messages.stream(model=MODEL, max_tokens=20, messages=HI) as stream:
        text = "".join([part async for part in stream.text_stream])
        message = await stream.get_final_message()
    assert text == "Hello there" and message.stop_reason == "end_turn"
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (23, 8)
    found = await events(r, {"model": MODEL, "max_tokens": 20, "messages": HI})
    names = [name for name, _ in found]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert found[0][1]["message"]["usage"]["input_tokens"] == 31


async def test_how_an_answer_ends(r: Rig, client: AsyncAnthropic) -> None:
    worker = await r.decode()
    worker.say("one two three")
    ended = []
    for options in ({"max_tokens": 1}, {"max_tokens": 20, "stop_sequences": ["x", " two"]}):
        message = await client.messages.create(model=MODEL, messages=HI, **options)  # type: ignore[call-overload]
        ended.append((message.content[0].text, message.stop_reason, message.stop_sequence))
    assert ended == [("one", "max_tokens", None), ("one", "stop_sequence", " two")]
    worker.script = [Token(id=2)]
    message = await client.messages.create(model=MODEL, max_tokens=5, messages=HI)
    assert (message.content, message.stop_reason) == ([], "end_turn")
    found = await events(r, {"model": MODEL, "max_tokens": 5, "messages": HI})
    assert [name for name, _ in found] == ["message_start", "message_delta", "message_stop"]


async def test_system_blocks_and_a_begun_answer_are_the_prompt(r: Rig, client: AsyncAnthropic) -> None:
    worker = await r.decode()
    worker.say(" is it")
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "This"},
    ]
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    message = await client.messages.create(model=MODEL, max_tokens=9, system=system, messages=turns)
    assert message.content[0].text == " is it"  # type: ignore[union-attr]
    prompt = text_model().decode(worker.requests[0].prompt)
    assert prompt == "system\nBe brief.\nuser\nab\nassistant\nThis"


async def test_counting_is_what_generating_counts(r: Rig, client: AsyncAnthropic) -> None:
    worker = await r.decode()
    worker.say("Hello")
    count = await client.messages.count_tokens(model=MODEL, messages=HI, system="Be brief.")
    message = await client.messages.create(model=MODEL, max_tokens=5, messages=HI, system="Be brief.")
    assert count.input_tokens == message.usage.input_tokens > 0


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"messages": [{"role": "system", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": []}, "messages"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(r: Rig, changes: dict[str, Any], names: str) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": HI, **changes}
    status, answer = await r.post(MESSAGES, body)
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert re.search(names, answer["error"]["message"]), answer


async def test_unknown_fields_and_hints_are_ignored(r: Rig) -> None:
    (await r.decode()).say("Hello")
    hints = {"metadata": {"user_id": "u"}, "service_tier": "auto", "tools": [], "nobody_knows": 1}
    status, answer = await r.post(MESSAGES, {"model": MODEL, "max_tokens": 5, "messages": HI, **hints})
    assert (status, answer["content"]) == (200, [{"type": "text", "text": "Hello"}])


async def test_failures_are_the_clients_own_exceptions(r: Rig, client: AsyncAnthropic) -> None:
    ask = {"model": MODEL, "max_tokens": 5, "messages": HI}
    with pytest.raises(anthropic.NotFoundError, match="does not exist here"):
        await client.messages.create(**{**ask, "model": "other"})
    with pytest.raises(anthropic.InternalServerError) as nobody:
        await client.messages.create(**ask)
    assert nobody.value.status_code == 503 and nobody.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index, call-overload]
    (await r.decode()).refusal = RequestRefused(Code.OVERLOADED, "full", retryable=True, retry_after_s=7.0)
    with pytest.raises(anthropic.RateLimitError) as full:
        await client.messages.create(**ask)
    assert full.value.response.headers["retry-after"] == "7"


async def test_a_stream_that_breaks_ends_with_an_error_and_no_stop(r: Rig) -> None:
    worker = await r.decode()

    async def breaks(me: FakeWorker, request: Generate) -> None:
        await me.tokens(request, 0, Token(id=33203))
        await me.fail(request, Code.INTERNAL, retryable=False)

    worker.behaviour = breaks
    found = await events(r, {"model": MODEL, "max_tokens": 5, "messages": HI})
    assert [name for name, _ in found][-1] == "error"
    assert found[-1][1]["error"]["type"] == "api_error"
    assert not any(name in ("message_delta", "message_stop") for name, _ in found)


async def test_models_in_both_languages(r: Rig, client: AsyncAnthropic) -> None:
    page = await client.models.list()
    assert [model.id for model in page.data] == [MODEL]
    assert (await client.models.retrieve(MODEL)).display_name == MODEL
    status, answer = await r.get("/v1/models")
    assert (status, answer["object"]) == (200, "list")


async def test_tokenize_and_back(r: Rig) -> None:
    status, tokens = await r.post("/tokenize", {"prompt": "Hello there", "return_token_strs": True})
    assert status == 200 and tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) == 2
    assert tokens["max_model_len"] == 8192
    assert await r.post("/detokenize", {"tokens": tokens["tokens"]}) == (200, {"prompt": "Hello there"})
    _, chat = await r.post("/tokenize", {"model": MODEL, "messages": HI})
    _, count = await r.post("/v1/messages/count_tokens", {"model": MODEL, "messages": HI})
    assert chat["count"] == count["input_tokens"] == 31
    for path, body, names in (
        ("/tokenize", {}, "prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "not both"),
        ("/tokenize", {"model": "other", "prompt": "x"}, "does not exist"),
        ("/tokenize", {"prompt": "\ud800"}, "surrogate"),
        ("/detokenize", {"tokens": [10**6]}, "tokens[0]"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ):
        status, answer = await r.post(path, body)
        assert status in (400, 404) and names in answer["error"]["message"], answer
