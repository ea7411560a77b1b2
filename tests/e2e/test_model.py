"""SmolLM2-135M through real processes: the same text however it is served, nothing left over, every trace whole."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest

from tests.e2e.running import Baton

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

FREED_WITHIN_S = 2.0
STATUS_S = 4.0  # what `baton status` itself may take where the cores are busy
SIBLINGS = (
    "tokenize", "route", "prefill.queue", "kv.pull", "prefill.compute", "handoff", "decode.queue",
    "decode.first_step", "deliver",
)  # fmt: skip


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baton]:
    """Prefill and decode apart, chunks of 512."""
    running = Baton(tmp_path_factory.mktemp("apart"), "--max-step-tokens", "512")
    yield running
    assert running.stop() == 0, "".join(running.output)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baton]:
    """One worker that does both, in chunks of 64."""
    running = Baton(tmp_path_factory.mktemp("alone"), "--prefill", "0", "--max-step-tokens", "64")
    yield running
    assert running.stop() == 0, "".join(running.output)


def ids(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 49000) for _ in range(length)]


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("length", [1, 16, 17, 255, 700])
def test_text_is_equal_cold_cached_and_by_one_worker_in_other_chunks(
    baton: Baton, alone: Baton, length: int
) -> None:
    prompt = ids(length, seed=length)
    cold = baton.complete(prompt, max_tokens=10)
    again = baton.complete(prompt, max_tokens=10)
    single = alone.complete(prompt, max_tokens=10)
    assert cached(cold) == 0 and cached(again) == min(length // 16 * 16, length - 1)
    assert text(again) == text(cold) == text(single)
    assert cold["usage"]["completion_tokens"] == 10


@pytest.mark.slow
def test_the_longest_prompt_is_served_and_one_token_more_is_refused(baton: Baton, tmp_path: Path) -> None:
    prompt = ids(8191, seed=5)
    cold = baton.complete(prompt, max_tokens=1)
    again = baton.complete(prompt, max_tokens=1)
    one_worker = Baton(tmp_path, "--prefill", "0")  # in chunks of 256: those of 64 would take minutes
    try:
        single = one_worker.complete(prompt, max_tokens=1)
    finally:
        assert one_worker.stop() == 0
    assert (cached(cold), cached(again)) == (0, 8176)
    assert text(again) == text(cold) == text(single) != ""
    body = {"model": baton.model(), "prompt": [*prompt, 1], "max_tokens": 1}
    for stream in (False, True):
        status, error = baton.post("/v1/completions", {**body, "stream": stream})
        assert (status, error["error"]["code"]) == (400, "context_length_exceeded")
        assert "8192" in error["error"]["message"]


def test_text_is_equal_alone_and_among_sixteen_others(baton: Baton) -> None:
    prompts = [ids(20 + 7 * n, seed=100 + n) for n in range(17)]
    sampled = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
    alone_texts = [text(baton.complete(prompts[n], max_tokens=10, **sampled)) for n in (0, 8, 16)]
    with ThreadPoolExecutor(17) as pool:
        answers = list(pool.map(lambda p: baton.complete(p, max_tokens=10, **sampled), prompts))
    assert [text(answers[n]) for n in (0, 8, 16)] == alone_texts
    baton.until_idle(5)


def test_openai_client_streams_what_it_gets_whole(baton: Baton) -> None:
    client = openai.OpenAI(base_url=f"{baton.url}/v1", api_key="none")
    question: Any = {
        "model": baton.model(),
        "messages": [{"role": "user", "content": "Name three colours."}],
        "temperature": 0,
        "max_tokens": 40,
    }
    whole = client.chat.completions.create(**question)
    chunks = list(
        client.chat.completions.create(**question, stream=True, stream_options={"include_usage": True})
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content != ""
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 16


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/chat/completions", {"model": "no-such", "messages": [{"role": "user", "content": "x"}]}, 404, "model"),
        ("/v1/chat/completions", {"messages": "hello"}, 400, "messages"),
        ("/v1/completions", {"prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "temperature": 99}, 400, "temperature"),
    ],
)  # fmt: skip
def test_mistakes_are_named(baton: Baton, path: str, body: dict[str, Any], status: int, param: str) -> None:
    got, answer = baton.post(path, {"model": baton.model(), **body})
    assert (got, answer["error"]["param"]) == (status, param)


def test_the_last_trace_is_whole_and_its_spans_sum_to_the_ttft(baton: Baton) -> None:
    for prompt in (ids(300, seed=time.time_ns()), ids(1, seed=1)):
        baton.complete(prompt, max_tokens=8)
        trace = baton.json("trace", "--last")
        spans = trace["spans"]
        roots = [span for span in spans if span["parent_id"] is None]
        assert len(roots) == 1 and trace["orphans"] == []
        names = {span["name"] for span in spans if span["parent_id"] == roots[0]["span_id"]}
        assert {*SIBLINGS, "decode"} - {"kv.pull"} <= names
        services = {span["service"] for span in spans}
        assert {"gateway", "prefill", "decode"} <= services
        accounted = sum(span["duration_ms"] for span in spans if span["name"] in SIBLINGS)
        assert abs(accounted - trace["ttft_ms"]) <= max(2.0, 0.05 * trace["ttft_ms"]), trace


def test_a_client_that_leaves_frees_its_blocks_on_both_sides(baton: Baton) -> None:
    """Row 21: in the queue, in prefill and in decode; streaming and not."""
    host = urlsplit(baton.url)
    for stream in (True, False):
        for length, wait_s in ((6000, 0.0), (6000, 1.5), (30, 0.8)):
            body = json.dumps(
                {"model": baton.model(), "prompt": ids(length, seed=time.time_ns()), "max_tokens": 2000,
                 "stream": stream, "ignore_eos": True}
            ).encode()  # fmt: skip
            with socket.create_connection((str(host.hostname), host.port or 80)) as client:
                head = (
                    f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(body)}\r\n\r\n"
                )
                client.sendall(head.encode() + body)
                time.sleep(wait_s)
            baton.until_idle(FREED_WITHIN_S + STATUS_S)


def test_random_aborts_leave_nothing(baton: Baton) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    plans = [(rng.randrange(1, 120), rng.random() * 1.5, rng.random() * 12) for _ in range(200)]

    async def one(client: openai.AsyncOpenAI, length: int, leave_s: float, start_s: float) -> None:
        await asyncio.sleep(start_s)
        request = client.completions.create(
            model=model, prompt=ids(length, seed=length), max_tokens=200, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip

        async def read() -> None:
            async for _ in await request:
                pass

        with contextlib.suppress(TimeoutError, openai.RateLimitError):
            await asyncio.wait_for(read(), leave_s)

    async def storm() -> None:
        async with openai.AsyncOpenAI(base_url=f"{baton.url}/v1", api_key="none", max_retries=0) as client:
            await asyncio.gather(*(one(client, *plan) for plan in plans))

    model = baton.model()
    asyncio.run(storm())
    baton.until_idle(15)
    assert baton.complete(ids(40, seed=1), max_tokens=4)["usage"]["completion_tokens"] == 4


def test_a_burst_beyond_capacity_waits_or_is_refused(tmp_path: Path) -> None:
    small = Baton(tmp_path, "--max-inflight", "6", "--kv-cache-mib", "64", "--max-batch", "4")
    try:
        model = small.model()

        def ask(number: int) -> tuple[int, Any]:
            body = {"model": model, "prompt": ids(100, seed=number), "max_tokens": 4}
            return small.post("/v1/completions", body)

        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(ask, range(20)))
        statuses = [status for status, _ in answers]
        assert set(statuses) <= {200, 429} and statuses.count(200) >= 6 and 429 in statuses
        small.until_idle(5)
    finally:
        assert small.stop() == 0


def test_both_clients_get_the_same_words(baton: Baton) -> None:
    """The official packages, streaming and not: four ways to ask the same."""
    conversation: Any = [{"role": "user", "content": "Name three colours."}]
    one = openai.OpenAI(base_url=f"{baton.url}/v1", api_key="none")
    other = anthropic.Anthropic(base_url=baton.url, api_key="none")
    common: Any = {
        "model": baton.model(),
        "max_tokens": 32,
        "messages": conversation,
        "extra_body": {"temperature": 0},  # which newer clients of Anthropic's have no argument for
    }
    completion = one.chat.completions.create(**common)
    chunks = one.chat.completions.create(**common, stream=True)
    message = other.messages.create(**common)
    with other.messages.stream(**common) as stream:
        streamed = stream.get_final_message()
    words = completion.choices[0].message.content
    assert words
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == words
    for answer in (message, streamed):
        assert "".join(block.text for block in answer.content if block.type == "text") == words
        assert answer.usage.output_tokens == completion.usage.completion_tokens  # type: ignore[union-attr]
    counted = other.messages.count_tokens(model=baton.model(), messages=conversation)
    assert counted.input_tokens == completion.usage.prompt_tokens  # type: ignore[union-attr]
