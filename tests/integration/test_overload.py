"""Four times what the workers can do: what is accepted is done in time, the rest is told so at once.

The gateway and the workers are real, their runners FAKE, with steps of a known length.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from libs.service.config import Settings
from tests.cluster import CARD, Cluster
from tests.gateway_rig import Rig, completion, rig, until
from tests.natsd import nats_url

__all__ = ["nats_url"]

DEADLINE_S = 2.0
STEP_S = 0.05  # reads up to 64 tokens, or writes one of each answer


@asynccontextmanager
async def town(nats_url: str, tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Rig, Cluster]]:
    async with rig(nats_url, tmp_path, request_timeout_s=DEADLINE_S) as gateway:
        shared = Settings(
            nats_url=nats_url, state_dir=tmp_path, heartbeat_s=0.1, max_step_tokens=64, **settings
        )
        workers = Cluster(nats_url, tmp_path, shared)
        try:
            yield gateway, workers
            await gateway.is_idle()
            await until(lambda: all(one.is_clean for one in workers.workers.values()), "clean workers")
        finally:
            await workers.close()


@pytest.fixture(autouse=True)
def same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gateway_rig.FINGERPRINT", CARD.fingerprint)


async def flood(
    gateway: Rig, count: int, every_s: float, prompt_tokens: int, max_tokens: int
) -> Counter[str]:
    """What became of so many requests. A refusal without Retry-After counts as "odd"."""
    rng = random.Random(0)

    async def ask() -> str:
        prompt = [rng.randrange(1000) for _ in range(prompt_tokens)]
        body = completion(prompt, max_tokens=max_tokens, ignore_eos=True, temperature=0)
        async with gateway.session.post(gateway.url + "/v1/completions", data=json.dumps(body)) as response:
            if response.status == 200:
                return "done"
            answer = await response.json()
            is_refusal = response.status == 429 and int(response.headers["Retry-After"]) >= 1
            return "refused" if is_refusal else f"odd {response.status} {answer}"

    asked = []
    for _ in range(count):
        asked.append(asyncio.create_task(ask()))
        await asyncio.sleep(every_s)
    return Counter(await asyncio.gather(*asked))


@pytest.mark.parametrize("prefill", [True, False], ids=["prefill is the bottleneck", "no prefill worker"])
async def test_prompts_beyond_capacity(nats_url: str, tmp_path: Path, prefill: bool) -> None:
    """A prompt takes two steps: ten in a second. Forty come."""
    async with town(nats_url, tmp_path) as (gateway, workers):
        await workers.add("decode", "decode-1", step_delay_s=0.0 if prefill else STEP_S)
        if prefill:
            await workers.add("prefill", "prefill-1", step_delay_s=STEP_S)
            await until(lambda: gateway.gateway.fleet.serving("prefill"), "heartbeat")
        await until(lambda: gateway.gateway.fleet.serving("decode"), "heartbeat")
        await flood(gateway, 3, 0.2, 128, 4)  # what is not known yet cannot be judged
        became = await flood(gateway, 160, 0.025, 128, 4)
        assert set(became) == {"done", "refused"}, became
        assert became["done"] >= 20, became


async def test_answers_beyond_capacity(nats_url: str, tmp_path: Path) -> None:
    """Four at a time, ten steps each: eight in a second. Thirty-two come."""
    async with town(nats_url, tmp_path, max_batch=4) as (gateway, workers):
        await workers.add("decode", "decode-1", step_delay_s=STEP_S)
        await until(lambda: gateway.gateway.fleet.serving("decode"), "heartbeat")
        await flood(gateway, 3, 0.2, 8, 10)
        became = await flood(gateway, 128, 0.03, 8, 10)
        assert set(became) == {"done", "refused"}, became
        assert became["done"] >= 16, became


async def test_exactly_what_does_not_fit_is_refused(nats_url: str, tmp_path: Path) -> None:
    """Row 58: two at work, three may wait; of nine, four are refused. Those who leave make room for others."""
    gate = threading.Event()
    async with town(nats_url, tmp_path, max_batch=2, max_queue=3) as (gateway, workers):
        decode = await workers.add(
            "decode", "decode-1", num_blocks=96, before_step=lambda _: gate.wait(10) or None
        )
        await until(lambda: gateway.gateway.fleet.serving("decode"), "heartbeat")

        def ask(count: int) -> list[asyncio.Task[Counter[str]]]:
            return [asyncio.create_task(flood(gateway, 1, 0.0, 8, 4)) for _ in range(count)]

        asked = ask(9)
        await until(lambda: sum(task.done() for task in asked) == 4, "four refusals")
        assert all(task.result() == Counter(refused=1) for task in asked if task.done())
        waiting = [task for task in asked if not task.done()]
        for task in waiting[-2:]:
            task.cancel()
        await until(lambda: decode.worker.num_requests == 3, "two fewer")
        more = ask(3)
        await until(lambda: sum(task.done() for task in more) == 1, "one refusal")
        gate.set()
        served = [task for task in (*waiting[:-2], *more) if not task.cancelled()]
        became = Counter[str]()
        for task in served:
            became += await task
        assert became == Counter(done=5, refused=1)
