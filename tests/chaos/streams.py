"""Requests whose answers are known, asked as streams."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

NUM_ORDERS = 24
ANSWER_S = 180.0
_SHARED = 96  # tokens that some prompts have in common


@dataclass(frozen=True, slots=True)
class Order:
    """One request, without the model's name."""

    number: int
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got. Two of them are equal, or something was lost, doubled or made up."""

    text: str
    finish: str | None
    completion_tokens: int | None
    error: str = ""


def make_orders(rng: random.Random) -> list[Order]:
    """Prompts of 5 to 700 tokens, some with a common start; greedy, sampled, penalised answers of 30 to 90 tokens."""
    shared = [rng.randrange(100, 49000) for _ in range(_SHARED)]
    orders = []
    for number in range(NUM_ORDERS):
        own = [rng.randrange(100, 49000) for _ in range(rng.choice([5, 40, 200, 600]))]
        body: dict[str, Any] = {
            "prompt": shared + own if rng.random() < 0.5 else own,
            "max_tokens": rng.randrange(30, 90),
            "ignore_eos": True,
            "temperature": 0,
        }
        if rng.random() < 0.5:
            body |= {
                "temperature": 0.9,
                "top_p": 0.95,
                "seed": number,
                "frequency_penalty": rng.choice([0, 0.5]),
            }
        orders.append(Order(number, body))
    return orders


async def ask(session: aiohttp.ClientSession, url: str, model: str, order: Order) -> Answer:
    """Streams the answer to its end, whatever that is. Raises aiohttp.ClientError where the connection breaks."""
    body = {**order.body, "model": model, "stream": True, "stream_options": {"include_usage": True}}
    text, finish, tokens, error, done = "", None, None, "", False
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            return Answer("", None, None, f"{response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                error = error or str(event.get("error", ""))
                for choice in event.get("choices", ()):
                    text += choice["text"]
                    finish = choice["finish_reason"] or finish
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
    if not done and not error:
        error = "the stream ended without [DONE]"
    return Answer(text, finish, tokens, error)


async def ask_all(
    session: aiohttp.ClientSession, url: str, model: str, orders: Sequence[Order]
) -> list[Answer | BaseException]:
    """All at once; an exception in place of an answer where a connection broke."""
    asked = (ask(session, url, model, order) for order in orders)
    return await asyncio.gather(*asked, return_exceptions=True)


def new_session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
