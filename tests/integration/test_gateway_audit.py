"""Messages that are lost on the way, as by a NATS server that is killed: each is missed soon, and the answer is whole.

The gateway and the workers are real, their runners FAKE; what a worker or the gateway publishes is dropped by choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from libs.service.config import Settings
from libs.service.outbox import Outbox
from libs.wire.messages import Abort, Delta, Finished, Message, Offer, OfferFailed, StepOutput
from libs.worker import orphans
from services.gateway import audit
from tests.cluster import CARD, Cluster, cluster
from tests.gateway_rig import Rig, completion, hang, rig, until
from tests.natsd import nats_url

__all__ = ["nats_url"]

PROMPT = list(range(100, 400))
COMPLETIONS = "/v1/completions"
Drops = Callable[[Message], bool]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "QUIET_S", 0.2)
    monkeypatch.setattr(audit, "INTERVAL_S", 0.1)
    monkeypatch.setattr(orphans, "INTERVAL_S", 0.1)
    monkeypatch.setattr("tests.gateway_rig.FINGERPRINT", CARD.fingerprint)


@asynccontextmanager
async def town(nats_url: str, tmp_path: Path) -> AsyncIterator[tuple[Rig, Cluster]]:
    async with rig(nats_url, tmp_path, recovery_s=20.0) as gateway:
        settings = Settings(nats_url=nats_url, state_dir=tmp_path, heartbeat_s=0.1, max_step_tokens=64)
        workers = Cluster(nats_url, tmp_path, settings)
        try:
            yield gateway, workers
            await gateway.is_idle()
            await until(lambda: all(one.is_clean for one in workers.workers.values()), "clean workers")
        finally:
            await workers.close()


def drop(outbox: Outbox, drops: Drops, count: int = 1) -> list[Message]:
    """Loses the first `count` messages that `drops` says; returns them, as they are lost."""
    lost: list[Message] = []
    put = outbox.put

    def lossy(subject: str, message: Message, *rest: Any) -> None:
        if len(lost) < count and drops(message):
            lost.append(message)
        else:
            put(subject, message, *rest)

    outbox.put = lossy  # type: ignore[method-assign]
    return lost


async def ask(gateway: Rig, max_tokens: int = 8) -> str:
    status, answer = await gateway.post(
        COMPLETIONS, completion(PROMPT, max_tokens=max_tokens, ignore_eos=True, temperature=0)
    )
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == max_tokens
    return str(answer["choices"][0]["text"])


def outputs(message: Message, kind: type[Any]) -> list[Any]:
    found = message.outputs if isinstance(message, StepOutput) else ()
    return [output for output in found if isinstance(output, kind)]


def attempts(gateway: Rig) -> list[int]:
    """Of each request so far."""
    spans = [span for span in gateway.spans if span.name == "request"]
    return [int(str((span.attributes or {})["baton.attempts"])) for span in spans]


def is_last(message: Message) -> bool:
    return bool(outputs(message, Finished))


def is_token_5_or_later(message: Message) -> bool:
    return any(delta.seq >= 5 and delta.attempt == 1 for delta in outputs(message, Delta))


def is_first_offer(message: Message) -> bool:
    return isinstance(message, Offer) and message.first_block == 0


def is_last_offer(message: Message) -> bool:
    return isinstance(message, Offer) and message.first is not None


@pytest.mark.parametrize(
    ("drops", "count"),
    [(is_last, 1), (is_token_5_or_later, 1000)],
    ids=["the end", "all tokens from one on"],
)
async def test_the_answer_is_continued_where_it_was_lost(
    nats_url: str, tmp_path: Path, drops: Drops, count: int
) -> None:
    async with town(nats_url, tmp_path) as (gateway, workers):
        decode = await workers.add("decode", "decode-1", step_delay_s=0.02)
        await until(lambda: gateway.gateway.fleet.knows("decode-1"), "heartbeat")
        known = await ask(gateway, 40)
        lost = drop(decode.host.outbox, drops, count)
        assert await ask(gateway, 40) == known
        assert lost
        first, second = attempts(gateway)
        assert first == 1 < second


@pytest.mark.parametrize("drops", [is_first_offer, is_last_offer, lambda message: isinstance(message, Offer)])
async def test_decode_computes_what_prefill_offered_in_vain(
    nats_url: str, tmp_path: Path, drops: Drops
) -> None:
    async with town(nats_url, tmp_path) as (gateway, workers):
        prefill = await workers.add("prefill", "prefill-1")
        await workers.add("decode", "decode-1")
        await until(lambda: gateway.gateway.fleet.serving("prefill"), "heartbeat")
        await until(lambda: gateway.gateway.fleet.serving("decode"), "heartbeat")
        known = await ask(gateway)
        lost = drop(prefill.host.outbox, drops, 1000)
        assert await ask(gateway) == known
        assert lost
        assert attempts(gateway) == [1, 1]


async def test_decode_hears_twice_that_nobody_prefills(nats_url: str, tmp_path: Path) -> None:
    async with town(nats_url, tmp_path) as (gateway, workers):
        await workers.add("decode", "decode-1")
        prefill = await workers.add("prefill", "prefill-1", num_blocks=2)  # the prompt does not fit: refused
        await until(lambda: gateway.gateway.fleet.serving("prefill"), "heartbeat")
        await until(lambda: gateway.gateway.fleet.serving("decode"), "heartbeat")
        known = await ask(gateway)
        lost = drop(gateway.gateway.answering._parts.outbox, lambda it: isinstance(it, OfferFailed))
        assert await ask(gateway) == known
        assert lost and not prefill.worker.num_requests
        assert attempts(gateway) == [1, 1]


async def test_a_worker_that_is_only_slow_is_left_alone(nats_url: str, tmp_path: Path) -> None:
    async with town(nats_url, tmp_path) as (gateway, workers):
        await workers.add("decode", "decode-1", step_delay_s=0.7)
        await workers.add("prefill", "prefill-1", step_delay_s=0.5)
        await until(lambda: gateway.gateway.fleet.serving("prefill"), "heartbeat")
        await until(lambda: gateway.gateway.fleet.serving("decode"), "heartbeat")
        prompt_and_answer = await ask(gateway, 4)
        assert prompt_and_answer
        assert attempts(gateway) == [1]


async def test_a_worker_that_does_not_answer_is_not_judged(nats_url: str, tmp_path: Path) -> None:
    """An older one, without audits. The deadline is the client's."""
    async with rig(nats_url, tmp_path, request_timeout_s=1.5) as gateway:
        worker = await gateway.decode()
        worker.behaviour = hang
        status, answer = await gateway.post(COMPLETIONS, completion(PROMPT))
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        assert len(worker.requests) == 1


async def test_work_whose_abort_was_lost_is_given_up(nats_url: str, tmp_path: Path) -> None:
    async with town(nats_url, tmp_path) as (gateway, workers):
        decode = await workers.add("decode", "decode-1", step_delay_s=0.05)
        await until(lambda: gateway.gateway.fleet.serving("decode"), "heartbeat")
        lost = drop(gateway.gateway.answering._parts.outbox, lambda it: isinstance(it, Abort), 1000)
        asking = asyncio.create_task(ask(gateway, 900))
        await until(lambda: decode.host.kv.used, "decoding")
        asking.cancel()
        await until(lambda: lost, "the abort")
        assert decode.worker.num_requests == 1
        await until(lambda: not decode.worker.num_requests, "the worker to give it up")


async def test_work_of_a_gateway_that_is_gone_is_given_up(nats_url: str, tmp_path: Path) -> None:
    async with cluster(nats_url, tmp_path) as (workers, client):
        prefill = await workers.add("prefill", "prefill-1", step_delay_s=0.5)
        decode = await workers.add("decode", "decode-1", step_delay_s=0.05)
        await client.submit("r", PROMPT, max_tokens=900)
        assert decode.worker.num_requests == 1
        await until(lambda: decode.is_clean and prefill.is_clean, "the workers to give it up")
        assert len(client.answers["r"].ids) < 900
