"""Prefill and decode workers with FAKE runners in the test's own event loop, on a real NATS server.

The fake runner's answer depends on every byte of KV that it reads, so `fake_continuation` is an oracle for the
transfer, the cache and the bookkeeping at once. `Client` plays the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from libs.engine.fake import FAKE_LAYOUT, FakeModel, FakeRunner
from libs.engine.kv.pool import KvPool
from libs.engine.plan import StepPlan
from libs.service.bus import Bus, Incoming
from libs.service.config import Settings
from libs.service.telemetry import Telemetry
from libs.store.interface import Store
from libs.wire import subjects
from libs.wire.messages import (
    Abort,
    Accepted,
    Delta,
    Failed,
    Finished,
    Generate,
    Limits,
    Prefill,
    Role,
    Sampling,
    Source,
    StepOutput,
    Token,
)
from libs.worker.card import ModelCard
from libs.worker.host import Host
from libs.worker.report import Identity
from services.decode.worker import DecodeWorker
from services.prefill.worker import PrefillWorker

CARD = ModelCard("fake", "fake-model", context_length=4096, vocab_size=1000, layout=FAKE_LAYOUT)


@dataclass
class Running:
    """One worker and the means to end it."""

    host: Host
    worker: PrefillWorker | DecodeWorker
    spans: InMemorySpanExporter
    task: asyncio.Task[None]
    stop: asyncio.Event
    bus: Bus

    @property
    def is_clean(self) -> bool:
        kv = self.host.kv
        return kv.used == 0 and kv.free + kv.cached == kv.total and not self.worker.num_requests


@dataclass
class Cluster:
    url: str
    directory: Path
    settings: Settings
    workers: dict[str, Running] = field(default_factory=dict)

    async def add(
        self,
        role: Role,
        worker_id: str,
        *,
        num_blocks: int = 64,
        model: FakeModel | None = None,
        step_delay_s: float = 0.0,
        before_step: Callable[[StepPlan], None] | None = None,
        store: Store | None = None,
    ) -> Running:
        bus = await Bus.connect(self.url, worker_id)
        spans = InMemorySpanExporter()
        pool = KvPool(FAKE_LAYOUT, num_blocks)
        runner = FakeRunner(pool, model, step_delay_s=step_delay_s, before_step=before_step)
        identity = Identity(role, worker_id, time.time_ns())
        telemetry = Telemetry(role, worker_id, spans)
        host = Host(identity, self.settings, bus, telemetry, CARD, pool, runner, store)
        worker = PrefillWorker(host) if role == "prefill" else DecodeWorker(host)
        stop = asyncio.Event()
        task = asyncio.create_task(host.serve(worker, stop))
        running = Running(host, worker, spans, task, stop, bus)
        self.workers[worker_id] = running
        client = Client(bus)
        await client.until(lambda: host.is_serving or task.done())
        return running

    async def close(self) -> None:
        for running in self.workers.values():
            running.stop.set()
        for running in self.workers.values():
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await asyncio.wait_for(running.task, 10)
            running.host.telemetry.shutdown()
            await running.bus.close()


@dataclass
class Answer:
    tokens: list[Token] = field(default_factory=list)
    end: Finished | Failed | None = None
    first_seq: int = 0  # tokens that an earlier worker had sent
    done: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


class Client:
    """Plays a gateway: submits, reads StepOutputs, insists on gapless numbering."""

    def __init__(self, bus: Bus, gateway_id: str = "gateway-t") -> None:
        self.bus = bus
        self.gateway_id = gateway_id
        self.answers: defaultdict[str, Answer] = defaultdict(Answer)
        self.errors: list[str] = []

    async def start(self) -> None:
        await self.bus.subscribe(subjects.outputs(self.gateway_id), (StepOutput,), self._read)

    async def _read(self, message: StepOutput, incoming: Incoming) -> None:
        for output in message.outputs:
            answer = self.answers[output.request_id]
            if answer.end is not None:
                self.errors.append(f"{output.request_id}: {output} after {answer.end}")
            if isinstance(output, Delta):
                expected = answer.first_seq + len(answer.tokens)
                if output.seq != expected:
                    self.errors.append(f"{output.request_id}: seq {output.seq}, expected {expected}")
                answer.tokens.extend(output.tokens)
            else:
                answer.end = output
                answer.done.set()
            answer.changed.set()

    async def submit(
        self,
        request_id: str,
        prompt: list[int],
        *,
        max_tokens: int = 8,
        decode: str = "decode-1",
        prefill: str | None = "prefill-1",
        prefill_sources: tuple[Source, ...] = (),
        decode_sources: tuple[Source, ...] = (),
        store_blocks: int = 0,
        emitted: list[int] | None = None,
        tenant: str = "default",
        stop_token_ids: tuple[int, ...] = (),
        attempt: int = 0,
        deadline_s: float = 20.0,
    ) -> None:
        common = {
            "request_id": request_id,
            "attempt": attempt,
            "gateway_id": self.gateway_id,
            "tenant": tenant,
            "store_blocks": store_blocks,
            "prompt": tuple(prompt),
            "sampling": Sampling(temperature=0.0),
            "limits": Limits(max_tokens=max_tokens, stop_token_ids=stop_token_ids),
            "deadline_ns": time.time_ns() + int(deadline_s * 1e9),
            "sent_ns": time.time_ns(),
        }
        self.answers[request_id].first_seq = len(emitted or ())
        generate = Generate(
            **{**common, "prompt": tuple(prompt + (emitted or []))},
            num_emitted=len(emitted or ()),
            remote_prefill=prefill is not None,
            sources=decode_sources,
        )
        await self.bus.request(subjects.submit("decode", decode), generate, Accepted, timeout_s=2)
        if prefill is not None:
            message = Prefill(**common, decode_worker=decode, sources=prefill_sources)
            await self.bus.request(subjects.submit("prefill", prefill), message, Accepted, timeout_s=2)

    async def ask(self, request_id: str, prompt: list[int], **options: object) -> Answer:
        await self.submit(request_id, prompt, **options)  # type: ignore[arg-type]
        return await self.finished(request_id)

    async def finished(self, request_id: str, timeout_s: float = 20.0) -> Answer:
        answer = self.answers[request_id]
        await asyncio.wait_for(answer.done.wait(), timeout_s)
        assert not self.errors, self.errors
        return answer

    async def abort(self, request_id: str, attempt: int = 0) -> None:
        await self.bus.publish(subjects.ABORT_ALL, Abort(request_id=request_id, attempt=attempt))

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "condition not reached"
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def cluster(url: str, directory: Path, **settings: object) -> AsyncIterator[tuple[Cluster, Client]]:
    """A cluster without workers yet, and a client on it."""
    defaults: dict[str, object] = {"state_dir": directory, "heartbeat_s": 0.1, "drain_timeout_s": 5.0}
    running = Cluster(url, directory, Settings(**{**defaults, **settings}))  # type: ignore[arg-type]
    bus = await Bus.connect(url, "gateway-t")
    client = Client(bus)
    await client.start()
    try:
        yield running, client
    finally:
        await running.close()
        await bus.close()
