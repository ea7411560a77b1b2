"""Prefill and decode over real NATS and shared memory, with fake runners: the KV that arrives is the KV that left."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path

import pytest
from opentelemetry.context import Context

from libs.engine.fake import FakeModel, fake_continuation
from libs.engine.plan import StepPlan
from libs.transfer.interface import TransferError
from libs.transfer.nixl_agent import missing
from libs.transfer.tcp_exporter import TcpExporter
from libs.wire import subjects
from libs.wire.errors import Code, NoResponder, RequestRefused
from libs.wire.messages import (
    Failed,
    Finished,
    Message,
    Offer,
    OfferFailed,
    PoolRef,
    ServiceStatus,
    Source,
    StatusRequest,
)
from tests.cluster import Cluster, cluster
from tests.natsd import nats_url

__all__ = ["nats_url"]


def prompt_of(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def computed_tokens(running: Cluster, worker_id: str) -> int:
    spans = running.workers[worker_id].spans
    running.workers[worker_id].host.telemetry.flush()
    return len([span for span in spans.get_finished_spans() if span.name == "prefill.compute"])


async def all_clean(running: Cluster, timeout_s: float = 5.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not all(worker.is_clean for worker in running.workers.values()):
        states = {
            name: (worker.host.kv.used, worker.host.leases.count, worker.worker.num_requests)
            for name, worker in running.workers.items()
        }
        assert asyncio.get_running_loop().time() < deadline, f"used blocks, leases, requests: {states}"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 500])
async def test_text_is_the_same_handed_off_cached_or_computed_by_one_worker(
    nats_url: str, tmp_path: Path, length: int
) -> None:
    prompt = prompt_of(length)
    expected = fake_continuation(prompt, 8)
    async with cluster(nats_url, tmp_path, max_step_tokens=64) as (running, client):
        await running.add("prefill", "prefill-1")
        await running.add("decode", "decode-1")
        await running.add("decode", "decode-2")
        cold = await client.ask("cold", prompt)
        cached = await client.ask("cached", prompt)
        alone = await client.ask("alone", prompt, prefill=None, decode="decode-2")
        for answer in (cold, cached, alone):
            assert answer.ids == expected
            assert isinstance(answer.end, Finished) and answer.end.reason == "length"
        assert cold.end.cached.tokens == 0  # type: ignore[union-attr]
        assert cached.end.cached.tokens == min(length // 16 * 16, length - 1)  # type: ignore[union-attr]
        assert computed_tokens(running, "prefill-1") == 2
        assert computed_tokens(running, "decode-1") == 0, "decode computed a prompt that it was handed"
        await all_clean(running)


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
async def test_the_text_is_the_same_over_the_network_and_the_status_says_so(
    nats_url: str, tmp_path: Path, transport: str
) -> None:
    if transport == "nixl" and (reason := missing()):
        pytest.skip(reason)
    prompt = prompt_of(500)
    async with cluster(nats_url, tmp_path, max_step_tokens=64, transfers=transport) as (running, client):
        prefill = await running.add("prefill", "prefill-1")
        decode = await running.add("decode", "decode-1")
        answer = await client.ask("r", prompt)
        assert answer.ids == fake_continuation(prompt, 8)
        assert computed_tokens(running, "decode-1") == 0
        status = await client.bus.request(
            subjects.STATUS, StatusRequest(), ServiceStatus, timeout_s=5
        )  # of whoever answers first
        assert str(status.detail["exports"]).startswith(f"{transport}://127.0.0.1:")
        assert decode.host.links.describe() == f"prefill-1 {transport}" and not prefill.host.links.describe()
        await all_clean(running)


async def test_a_transfer_that_stalls_costs_its_deadline_and_no_token(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the network between two hosts is cut: nothing is refused, nothing arrives."""
    monkeypatch.setattr(TcpExporter, "_send", lambda *_: time.sleep(2))
    prompt = prompt_of(200)
    async with cluster(nats_url, tmp_path, transfers="tcp", pull_timeout_s=0.3) as (running, client):
        await running.add("prefill", "prefill-1")
        await running.add("decode", "decode-1")
        answer = await client.ask("r", prompt)
        assert answer.ids == fake_continuation(prompt, 8)
        await all_clean(running)


@pytest.mark.parametrize("length", [32, 40])
async def test_nothing_unconfirmed_is_written_over_a_block_with_a_name(
    nats_url: str, tmp_path: Path, length: int
) -> None:
    """Decode holds the whole prompt, and prefill offers it all the same: others share the blocks that it has."""
    prompt = prompt_of(length)
    async with cluster(nats_url, tmp_path) as (running, client):
        await running.add("prefill", "prefill-1")
        decode = await running.add("decode", "decode-1")
        await client.ask("first", prompt)
        kv, pull = decode.host.kv, decode.host.links.pull
        named = {kv.find(name) for name in kv.names()}
        written: list[int] = []

        async def watched(ref: PoolRef, copies: list[tuple[int, int]], timeout_s: float) -> None:
            written.extend(ours for _, ours in copies)
            await pull(ref, copies, timeout_s)

        decode.host.links.pull = watched  # type: ignore[method-assign, assignment]
        answer = await client.ask("again", prompt)
        assert answer.ids == fake_continuation(prompt, 8)
        assert len(named) >= 2 and named.isdisjoint(written)
        await all_clean(running)


async def test_blocks_that_decode_filled_are_pulled_by_the_next_turn(nats_url: str, tmp_path: Path) -> None:
    async with cluster(nats_url, tmp_path) as (running, client):
        await running.add("prefill", "prefill-1")
        await running.add("decode", "decode-1")
        first = await client.ask("one", prompt_of(40), max_tokens=60)
        turn = prompt_of(40) + first.ids + prompt_of(20, seed=2)
        sources = (Source(worker_id="decode-1", num_blocks=6),)
        second = await client.ask("two", turn, prefill_sources=sources)
        assert second.ids == fake_continuation(turn, 8)
        assert second.end.cached.tokens == 96  # type: ignore[union-attr]  # 99 tokens have KV, 6 full blocks
        await all_clean(running)


async def test_a_source_that_is_gone_or_knows_nothing_costs_only_the_computing(
    nats_url: str, tmp_path: Path
) -> None:
    async with cluster(nats_url, tmp_path) as (running, client):
        await running.add("prefill", "prefill-1")
        await running.add("decode", "decode-1")
        for seed, name in enumerate(("nobody", "decode-1")):
            sources = (Source(worker_id=name, num_blocks=9),)
            answer = await client.ask(name, prompt_of(200, seed=seed), prefill_sources=sources)
            assert isinstance(answer.end, Finished) and answer.end.cached.tokens == 0
        await all_clean(running)


@pytest.mark.parametrize("prefill", ["prefill-1", None])
async def test_a_source_that_is_gone_does_not_cost_what_is_here(
    nats_url: str, tmp_path: Path, prefill: str | None
) -> None:
    prompt = prompt_of(200)
    sources = {
        "prefill_sources" if prefill else "decode_sources": (Source(worker_id="nobody", num_blocks=12),)
    }
    async with cluster(nats_url, tmp_path) as (running, client):
        await running.add("prefill", "prefill-1")
        await running.add("decode", "decode-1")
        await client.ask("before", prompt[:100], prefill=prefill)
        answer = await client.ask("r", prompt, prefill=prefill, **sources)
        assert answer.ids == fake_continuation(prompt, 8)
        assert isinstance(answer.end, Finished) and answer.end.cached.tokens == 96
        await all_clean(running)


async def test_a_bug_in_fetching_is_told_and_leaves_nothing(nats_url: str, tmp_path: Path) -> None:
    prompt, sources = prompt_of(200), (Source(worker_id="prefill-1", num_blocks=12),)
    async with cluster(nats_url, tmp_path) as (running, client):
        prefill = await running.add("prefill", "prefill-1")
        decode = await running.add("decode", "decode-1")

        async def broken(*_: object) -> int:
            raise RuntimeError("injected")

        prefill.host.puller.pull = broken  # type: ignore[method-assign, assignment]
        computed = await client.ask("prefill", prompt, prefill_sources=sources)
        assert computed.ids == fake_continuation(prompt, 8), "decode computed it"
        decode.host.puller.pull = broken  # type: ignore[method-assign, assignment]
        failed = await client.ask("decode", prompt_of(200, seed=3), prefill=None, decode_sources=sources)
        assert isinstance(failed.end, Failed) and failed.end.retryable
        assert (failed.end.code, failed.end.message) == (Code.INTERNAL, "RuntimeError: injected")
        await all_clean(running)


@pytest.mark.parametrize("prefill", ["prefill-1", None])
async def test_one_token_is_one_token_and_a_stop_token_first_decodes_nothing(
    nats_url: str, tmp_path: Path, prefill: str | None
) -> None:
    """Row 40."""
    prompt = prompt_of(50)
    steps: list[StepPlan] = []
    async with cluster(nats_url, tmp_path) as (running, client):
        await running.add("prefill", "prefill-1")
        await running.add("decode", "decode-1", before_step=steps.append)
        one = await client.ask("one", prompt, max_tokens=1, prefill=prefill)
        assert one.ids == fake_continuation(prompt, 1)
        assert isinstance(one.end, Finished) and (one.end.reason, one.end.num_tokens) == ("length", 1)
        eos = one.ids[0]
        stopped = await client.ask("eos", prompt, stop_token_ids=(eos,), prefill=prefill)
        assert isinstance(stopped.end, Finished) and (stopped.end.reason, stopped.ids) == ("stop", [eos])
        if prefill:
            assert steps == [], "decode ran although prefill's token was the last"
        await all_clean(running)


async def test_prefill_that_fails_midway_is_never_decoded_from(nats_url: str, tmp_path: Path) -> None:
    """Row 41: half of the prompt's KV arrives, then prefill fails; decode computes the prompt itself."""
    calls = 0

    def fail_third_chunk(plan: StepPlan) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("injected")

    prompt = prompt_of(300)
    async with cluster(nats_url, tmp_path, max_step_tokens=64) as (running, client):
        await running.add("prefill", "prefill-1", before_step=fail_third_chunk)
        await running.add("decode", "decode-1")
        answer = await client.ask("r", prompt)
        assert answer.ids == fake_continuation(prompt, 8)
        assert computed_tokens(running, "decode-1") == 1
        await all_clean(running)


async def test_a_lease_that_ran_out_under_the_puller_is_computed_instead(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder gives the blocks to somebody else before the copy is confirmed: the copy must not be used."""
    prompt = prompt_of(200)
    async with cluster(nats_url, tmp_path) as (running, client):
        prefill = await running.add("prefill", "prefill-1")
        decode = await running.add("decode", "decode-1")
        pull = decode.host.links.pull

        async def late_pull(*args: object) -> None:
            expired = prefill.host.leases.reap(float("inf"))
            assert expired
            for block in range(prefill.host.kv.total):
                prefill.host._pool.blocks(block, 1)[:] = b"\xff" * prefill.host.card.layout.block_bytes
            await pull(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(decode.host.links, "pull", late_pull)
        answer = await client.ask("r", prompt)
        assert answer.ids == fake_continuation(prompt, 8)
        await all_clean(running)


@pytest.mark.parametrize("arrives", [True, False])
async def test_the_first_token_does_not_wait_for_the_blocks(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    """It is out while the pull still hangs. Where that fails, decode computes what follows; no token comes twice."""
    prompt = prompt_of(200)
    async with cluster(nats_url, tmp_path) as (running, client):
        await running.add("prefill", "prefill-1")
        decode = await running.add("decode", "decode-1")
        gate, pull = asyncio.Event(), decode.host.links.pull

        async def held(*args: object) -> None:
            await gate.wait()
            if not arrives:
                raise TransferError("injected")
            await pull(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(decode.host.links, "pull", held)
        await client.submit("r", prompt)
        await client.until(lambda: len(client.answers["r"].tokens) == 1)
        gate.set()
        answer = await client.finished("r")
        assert answer.ids == fake_continuation(prompt, 8)
        assert computed_tokens(running, "decode-1") == 0, "what follows the first token is no prefill"
        await all_clean(running)


async def test_a_last_token_that_prefill_drew_gives_the_blocks_back_at_once(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pull hangs, but nobody needs it: the answer is over, the lease is released, not left to run out."""
    async with cluster(nats_url, tmp_path, lease_s=300.0) as (running, client):
        await running.add("prefill", "prefill-1")
        decode = await running.add("decode", "decode-1")
        monkeypatch.setattr(decode.host.links, "pull", lambda *_: asyncio.sleep(300))
        answer = await client.ask("r", prompt_of(200), max_tokens=1)
        assert answer.ids == fake_continuation(prompt_of(200), 1)
        await all_clean(running)


async def test_offers_that_got_lost_cost_one_lease_not_the_deadline(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(100)
    async with cluster(nats_url, tmp_path, lease_s=0.5) as (running, client):
        prefill = await running.add("prefill", "prefill-1")
        await running.add("decode", "decode-1")
        put = prefill.host.outbox.put
        lost: list[object] = []

        def lose_offers(subject: str, message: Message, context: Context | None = None) -> None:
            if isinstance(message, Offer):
                lost.append(message)
            else:
                put(subject, message, context)

        monkeypatch.setattr(prefill.host.outbox, "put", lose_offers)
        answer = await client.ask("r", prompt)
        assert lost and answer.ids == fake_continuation(prompt, 8)
        await all_clean(running)


async def test_offers_out_of_order_or_for_nobody_do_no_harm(nats_url: str, tmp_path: Path) -> None:
    prompt = prompt_of(100)
    async with cluster(nats_url, tmp_path) as (running, client):
        await running.add("decode", "decode-1")
        failed = OfferFailed(request_id="unknown", attempt=0, code=Code.INTERNAL, message="x")
        await client.bus.publish(subjects.offer("decode-1"), failed)
        with pytest.raises(NoResponder):
            await client.submit("r", prompt)  # decode accepted, prefill is not there
        failed = OfferFailed(request_id="r", attempt=0, code=Code.INTERNAL, message="no prefill worker")
        await client.bus.publish(subjects.offer("decode-1"), failed)
        answer = await client.finished("r")
        assert answer.ids == fake_continuation(prompt, 8)
        await all_clean(running)


async def test_asked_twice_is_done_once(nats_url: str, tmp_path: Path) -> None:
    async with cluster(nats_url, tmp_path) as (running, client):
        await running.add("prefill", "prefill-1")
        await running.add("decode", "decode-1", step_delay_s=0.01)
        await client.submit("r", prompt_of(40), max_tokens=30)
        await client.submit("r", prompt_of(40), max_tokens=30)
        answer = await client.finished("r")
        assert answer.ids == fake_continuation(prompt_of(40), 30)
        await all_clean(running)


async def test_an_abort_that_overtakes_its_request_holds(nats_url: str, tmp_path: Path) -> None:
    async with cluster(nats_url, tmp_path) as (running, client):
        await running.add("decode", "decode-1")
        await client.abort("r", attempt=1)
        with pytest.raises(RequestRefused, match="aborted"):
            await client.submit("r", prompt_of(40), prefill=None, attempt=1)
        answer = await client.ask("r", prompt_of(40), prefill=None, attempt=2)
        assert answer.ids == fake_continuation(prompt_of(40), 8)


async def test_aborts_at_random_points_leave_nothing(nats_url: str, tmp_path: Path) -> None:
    """Row 42: 200 requests, aborted anywhere between queue and last token, while others run to their end."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    async with cluster(nats_url, tmp_path, max_step_tokens=64, max_queue=400) as (running, client):
        await running.add("prefill", "prefill-1", num_blocks=96, step_delay_s=0.001)
        await running.add("decode", "decode-1", num_blocks=96, step_delay_s=0.001)

        async def one(number: int) -> None:
            prompt, request_id = prompt_of(rng.randrange(1, 200), seed=rng.randrange(5)), f"r{number}"
            await asyncio.sleep(rng.random() * 1.5)
            prefill = "prefill-1" if rng.random() < 0.8 else None
            await client.submit(request_id, prompt, max_tokens=12, prefill=prefill, deadline_s=60)
            if number % 4 == 0:
                answer = await client.finished(request_id, timeout_s=60)
                assert answer.ids == fake_continuation(prompt, 12)
            else:
                await asyncio.sleep(rng.random() * 0.5)
                await client.abort(request_id)

        await asyncio.gather(*(one(number) for number in range(200)))
        await all_clean(running)
        assert not client.errors


async def test_more_than_fits_waits_and_all_end_alike(nats_url: str, tmp_path: Path) -> None:
    """16 requests of 12 blocks each through pools of 40: they wait for room, none hangs, none is wrong."""
    async with cluster(nats_url, tmp_path, max_step_tokens=64) as (running, client):
        await running.add("prefill", "prefill-1", num_blocks=40)
        await running.add("decode", "decode-1", num_blocks=40)
        prompts = {f"r{i}": prompt_of(150, seed=i) for i in range(16)}
        answers = await asyncio.gather(*(client.ask(k, v, max_tokens=40) for k, v in prompts.items()))
        for prompt, answer in zip(prompts.values(), answers, strict=True):
            assert answer.ids == fake_continuation(prompt, 40)
        await all_clean(running)


async def test_refusals_name_the_reason_and_keep_nothing(nats_url: str, tmp_path: Path) -> None:
    async with cluster(nats_url, tmp_path, max_queue=2, max_batch=2) as (running, client):
        gate = threading.Event()
        await running.add("decode", "decode-1", num_blocks=8, before_step=lambda _: gate.wait(10) or None)
        cases = {
            "": "no tokens",
            "long": "the context holds",
            "big": "do not fit this worker",
            "id": "token ids must",
        }
        bad = {"": [], "long": [1] * 4096, "big": prompt_of(200), "id": [1000]}
        for name, text in cases.items():
            with pytest.raises(RequestRefused, match=text):
                await client.submit(name, bad[name], prefill=None)
        for number in range(4):
            await client.submit(f"r{number}", prompt_of(5), prefill=None)
        with pytest.raises(RequestRefused) as refused:
            await client.submit("r4", prompt_of(5), prefill=None)
        assert (refused.value.code, refused.value.retryable) == (Code.OVERLOADED, True)
        gate.set()
        for number in range(4):
            assert (await client.finished(f"r{number}")).ids == fake_continuation(prompt_of(5), 8)
        await all_clean(running)


async def test_the_deadline_ends_a_request_that_nobody_prefills(nats_url: str, tmp_path: Path) -> None:
    async with cluster(nats_url, tmp_path) as (running, client):
        await running.add("decode", "decode-1")
        with pytest.raises(NoResponder):
            await client.submit("r", prompt_of(40), deadline_s=0.3)
        answer = await client.finished("r", timeout_s=5)
        assert isinstance(answer.end, Failed) and answer.end.code == Code.DEADLINE_EXCEEDED
        await all_clean(running)


async def test_drain_finishes_what_runs_and_takes_nothing_new(nats_url: str, tmp_path: Path) -> None:
    async with cluster(nats_url, tmp_path) as (running, client):
        prefill = await running.add("prefill", "prefill-1", step_delay_s=0.05)
        decode = await running.add("decode", "decode-1", step_delay_s=0.01)
        await client.submit("r", prompt_of(100), max_tokens=40)
        decode.stop.set()
        prefill.stop.set()
        await client.until(lambda: decode.host.state != "serving")
        with pytest.raises(RequestRefused, match="draining"):
            await client.submit("late", prompt_of(10), prefill=None)
        answer = await client.finished("r")
        assert answer.ids == fake_continuation(prompt_of(100), 40)
        await asyncio.wait_for(asyncio.gather(prefill.task, decode.task), 10)
        assert not list((tmp_path / "run").glob("*.sock"))


async def test_a_scripted_answer_arrives_token_by_token_in_order(nats_url: str, tmp_path: Path) -> None:
    prompt = prompt_of(20)
    model = FakeModel(script={tuple(prompt): [7, 8, 9, 2]})
    async with cluster(nats_url, tmp_path) as (running, client):
        await running.add("prefill", "prefill-1", model=model)
        await running.add("decode", "decode-1", model=model)
        answer = await client.ask("r", prompt, max_tokens=50, stop_token_ids=(2,))
        assert answer.ids == [7, 8, 9, 2]
        assert isinstance(answer.end, Finished) and answer.end.reason == "stop"
