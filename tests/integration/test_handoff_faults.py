"""Faults of a handoff that users of other systems met, each with its numbers. The runners are FAKE."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from libs.engine.fake import fake_continuation
from libs.service.outbox import Outbox
from libs.wire import subjects
from libs.wire.messages import Accepted, Limits, Message, Offer, Prefill, Sampling
from tests.cluster import Cluster, cluster
from tests.natsd import nats_url

__all__ = ["nats_url"]

PROMPT = list(range(100, 300))


def steps_that_computed(running: Cluster, worker_id: str) -> int:
    worker = running.workers[worker_id]
    worker.host.telemetry.flush()
    return sum(span.name == "prefill.compute" for span in worker.spans.get_finished_spans())


def hold_back(outbox: Outbox, kind: type[Message]) -> asyncio.Event:
    """From now on, messages of this kind wait for the event."""
    gate, put, tasks = asyncio.Event(), outbox.put, set[asyncio.Task[None]]()

    async def later(*message: Any) -> None:
        await gate.wait()
        put(*message)

    def held(subject: str, message: Message, *rest: Any) -> None:
        if isinstance(message, kind):
            tasks.add(asyncio.ensure_future(later(subject, message, *rest)))
        else:
            put(subject, message, *rest)

    outbox.put = held  # type: ignore[method-assign]
    return gate


async def test_prefill_lets_go_when_decode_does_not_want_it(nats_url: str, tmp_path: Path) -> None:
    """Row 44: decode turns the prompt away after prefill is done; its blocks were held for 480 s elsewhere."""
    async with cluster(nats_url, tmp_path, lease_s=480.0) as (running, client):
        prefill = await running.add("prefill", "prefill-1")
        await running.add("decode", "decode-1")
        request = Prefill(
            request_id="r",
            attempt=1,
            gateway_id=client.gateway_id,
            tenant="default",
            prompt=tuple(PROMPT),
            sampling=Sampling(temperature=0.0),
            limits=Limits(max_tokens=8),
            decode_worker="decode-1",
            deadline_ns=time.time_ns() + 600_000_000_000,
            sent_ns=time.time_ns(),
        )
        await client.bus.request(subjects.submit("prefill", "prefill-1"), request, Accepted, timeout_s=2)
        await client.until(lambda: prefill.host.kv.used > 0)
        await client.until(lambda: prefill.is_clean and not prefill.host.leases.count, timeout_s=2)


async def test_prefill_lets_go_when_the_gateway_gives_the_request_up(nats_url: str, tmp_path: Path) -> None:
    """Row 44, where decode's own refusal ended the request: the abort reaches what was offered already."""
    async with cluster(nats_url, tmp_path, lease_s=480.0) as (running, client):
        prefill = await running.add("prefill", "prefill-1")
        await running.add("decode", "decode-1")
        gate = hold_back(prefill.host.outbox, Offer)
        await client.submit("r", PROMPT)
        await client.until(lambda: prefill.host.leases.count > 0 and not prefill.worker.num_requests)
        await client.abort("r")
        await client.until(lambda: prefill.is_clean and not prefill.host.leases.count, timeout_s=2)
        gate.set()  # the offers come after all, for nobody


@pytest.mark.parametrize("transfers", ["shm", "tcp"])
async def test_a_worker_that_stops_lets_transfers_end(nats_url: str, tmp_path: Path, transfers: str) -> None:
    """Row 48: SIGTERM to prefill while decode still pulls, on a slow link: nothing fails, nothing is computed again."""
    async with cluster(nats_url, tmp_path, transfers=transfers, drain_timeout_s=10.0) as (running, client):
        prefill = await running.add("prefill", "prefill-1")
        decode = await running.add("decode", "decode-1")
        pull, pulling = decode.host.links.pull, asyncio.Event()

        async def slow(*arguments: Any) -> None:
            pulling.set()
            await asyncio.sleep(0.5)
            await pull(*arguments)

        decode.host.links.pull = slow  # type: ignore[method-assign]
        for number in range(4):
            await client.submit(f"r{number}", [*PROMPT, number])
        await pulling.wait()
        prefill.stop.set()
        for number in range(4):
            answer = await client.finished(f"r{number}")
            assert answer.ids == fake_continuation([*PROMPT, number], 8)
        await asyncio.wait_for(prefill.task, 10)
        assert steps_that_computed(running, "decode-1") == 0
        assert decode.is_clean
