"""A gateway in the test's own event loop, behind real HTTP and a real NATS server; its workers are scripted.

async with rig(nats_url) as r:
    decode = await r.decode("decode-1")
    decode.say("Hello")
    status, body = await r.post("/v1/completions", {"model": MODEL, "prompt": "x"})
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from openai import AsyncOpenAI
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from libs.checkpoint.open import open_checkpoint, resolve_model
from libs.engine.kv.names import root_name
from libs.service.bus import Bus, Incoming
from libs.service.config import Settings
from libs.service.telemetry import Telemetry
from libs.text.model import TextModel
from libs.wire import subjects
from libs.wire.errors import RequestRefused
from libs.wire.messages import (
    Abort,
    Accepted,
    Cached,
    Delta,
    Done,
    Failed,
    Finished,
    Generate,
    Heartbeat,
    Load,
    Message,
    Offer,
    OfferFailed,
    Placement,
    Prefill,
    Role,
    Route,
    StepOutput,
    Token,
)
from services.gateway.app import listen, make_runner
from services.gateway.gateway import Gateway, Model

MODEL = "test-model"
FINGERPRINT = "f" * 64
LAYOUT = "layout-1"
BLOCK = 16
CONTEXT = 8192
PATIENCE_S = 10.0  # of waits that end as soon as what they wait for is there
ROOT_NAME = root_name(FINGERPRINT, LAYOUT, "default")

Behaviour = Callable[["FakeWorker", Generate], Awaitable[None]]


@lru_cache(maxsize=1)
def text_model() -> TextModel:
    """The tokenizer of the embedded model: reads the file's metadata, none of its weights."""
    return TextModel.from_checkpoint(open_checkpoint(resolve_model("smollm2")))


async def until(condition: Callable[[], object], what: str = "condition") -> None:
    """Returns when `condition()` is true. Raises AssertionError after `PATIENCE_S`."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {PATIENCE_S:g} s for {what}"
        await asyncio.sleep(0.005)


class FakeWorker:
    """Speaks a worker's part of the wire. What it answers is a script; what it was told is kept."""

    def __init__(self, bus: Bus, worker_id: str, role: Role) -> None:
        self.bus = bus
        self.worker_id = worker_id
        self.role = role
        self.epoch = 1
        self.model_fingerprint = FINGERPRINT
        self.layout = LAYOUT
        self.state: Any = "serving"
        self.cached_tokens = 0
        self.refusal: RequestRefused | None = None
        self.answers = True  # False: takes requests in and never replies, like a stopped process
        self.behaviour: Behaviour = emit_script
        self.script: list[Token] = [Token(id=2)]
        self.step_s = 0.0
        self.requests: list[Generate | Prefill] = []
        self.contexts: list[Incoming] = []
        self.aborts: list[Abort] = []
        self.offers: list[Offer | OfferFailed] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._beating: asyncio.Task[None] | None = None
        self._subscriptions: list[Any] = []

    def say(self, text: str, *, end: bool = True) -> None:
        """The answer to every request: `text`, then the token that ends a turn."""
        ids = text_model().encode(text)
        self.script = [Token(id=i) for i in ids] + ([Token(id=2)] if end else [])

    async def start(self) -> FakeWorker:
        await self.listen()
        self._beating = asyncio.create_task(self._beat())
        return self

    async def listen(self) -> None:
        bus, me = self.bus, self.worker_id
        kind: Any = Generate if self.role == "decode" else Prefill
        self._subscriptions = [
            await bus.subscribe(subjects.submit(self.role, me), (kind,), self._submit),
            await bus.subscribe(subjects.submit_any(self.role), (kind,), self._submit, queue=self.role),
            await bus.subscribe(subjects.abort(me), (Abort,), self._abort),
            await bus.subscribe(subjects.ABORT_ALL, (Abort,), self._abort),
            await bus.subscribe(subjects.offer(me), (Offer, OfferFailed), self._offer),
        ]

    async def cut_off(self) -> None:
        """It beats, and nothing reaches it."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions = []

    def die_soon(self) -> None:
        """For behaviours, which die with their worker."""
        self._death = asyncio.ensure_future(self.die())

    async def die(self) -> None:
        """Without a word."""
        if self._beating is not None:
            self._beating.cancel()
        for task in self._tasks:
            task.cancel()
        await self.cut_off()

    async def beat(self) -> None:
        load = Load(waiting=0, running=0, blocks_free=9, blocks_cached=0, blocks_total=9, queue_limit=9)
        heartbeat = Heartbeat(
            worker_id=self.worker_id,
            role=self.role,
            epoch=self.epoch,
            model=MODEL,
            model_fingerprint=self.model_fingerprint,
            layout=self.layout,
            context_length=CONTEXT,
            block_size=BLOCK,
            load=load,
            state=self.state,
        )
        await self.bus.publish(subjects.heartbeat(self.role, self.worker_id), heartbeat)

    async def send(self, gateway_id: str, *outputs: Delta | Finished | Failed) -> None:
        message = StepOutput(worker_id=self.worker_id, outputs=outputs)
        await self.bus.publish(subjects.outputs(gateway_id), message)

    async def tokens(self, request: Generate, seq: int, *tokens: Token, **fields: Any) -> None:
        delta = Delta(
            request_id=request.request_id, attempt=request.attempt, seq=seq, tokens=tokens, **fields
        )
        await self.send(request.gateway_id, delta)

    async def finish(self, request: Generate, reason: Any, num_tokens: int) -> None:
        finished = Finished(
            request_id=request.request_id,
            attempt=request.attempt,
            reason=reason,
            num_tokens=num_tokens,
            cached=Cached(tokens=self.cached_tokens),
        )
        await self.send(request.gateway_id, finished)

    async def fail(self, request: Generate, code: str, *, retryable: bool) -> None:
        failed = Failed(
            request_id=request.request_id,
            attempt=request.attempt,
            code=code,
            message=f"scripted: {code}",
            retryable=retryable,
        )
        await self.send(request.gateway_id, failed)

    def is_aborted(self, request: Generate) -> bool:
        return any(
            abort.request_id == request.request_id and abort.attempt >= request.attempt
            for abort in self.aborts
        )

    async def _submit(self, request: Generate | Prefill, incoming: Incoming) -> Message | None:
        self.requests.append(request)
        self.contexts.append(incoming)
        if not self.answers:
            return None
        if self.refusal is not None:
            raise self.refusal
        if isinstance(request, Generate):
            task = asyncio.ensure_future(self.behaviour(self, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return Accepted(worker_id=self.worker_id)

    async def _abort(self, message: Abort, incoming: Incoming) -> None:
        self.aborts.append(message)

    async def _offer(self, message: Offer | OfferFailed, incoming: Incoming) -> None:
        self.offers.append(message)

    async def _beat(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(0.1)


async def emit_script(worker: FakeWorker, request: Generate) -> None:
    """As a real worker: a token a step, from where an earlier one stopped, until the limit, an end token, an abort."""
    limits = request.limits
    for sent, token in enumerate(worker.script):
        if sent < request.num_emitted:
            continue
        if worker.step_s:
            await asyncio.sleep(worker.step_s)
        if worker.is_aborted(request):
            return
        await worker.tokens(request, sent, token)
        if token.id in limits.stop_token_ids and not limits.ignore_eos:
            await worker.finish(request, "stop", sent + 1)
            return
        if sent + 1 == limits.max_tokens:
            await worker.finish(request, "length", sent + 1)
            return


async def hang(worker: FakeWorker, request: Generate) -> None:
    """Accepts and says nothing more."""


class FakeCoordinator:
    """Places every request as `placement` says; keeps what it was asked."""

    def __init__(self, bus: Bus) -> None:
        self.placement: Placement | None = None
        self.routes: list[Route] = []
        self.done: list[str] = []
        self._bus = bus

    async def start(self) -> FakeCoordinator:
        await self._bus.subscribe(subjects.ROUTE, (Route,), self._route, queue="coordinator")
        await self._bus.subscribe(subjects.DONE, (Done,), self._on_done)
        return self

    async def _route(self, route: Route, incoming: Incoming) -> Placement | None:
        self.routes.append(route)
        return self.placement

    async def _on_done(self, done: Done, incoming: Incoming) -> None:
        self.done.append(done.request_id)


def place(decode: str, prefill: str | None = None, **fields: Any) -> Placement:
    hits: dict[str, Any] = {"decode_hit_blocks": 0, "prefill_hit_blocks": 0, "reason": "test", "score": 1.0}
    return Placement(decode=decode, prefill=prefill, **(hits | fields))


class Rig:
    """One gateway, and clients of it."""

    def __init__(
        self, bus: Bus, gateway: Gateway, app: web.Application, url: str, spans: InMemorySpanExporter
    ) -> None:
        self.bus = bus
        self._app = app
        self.gateway = gateway
        self.url = url
        self._spans = spans
        self.session = aiohttp.ClientSession()
        self.workers: list[FakeWorker] = []

    async def worker(self, worker_id: str, role: Role) -> FakeWorker:
        """Started, and heard by the gateway."""
        worker = await FakeWorker(self.bus, worker_id, role).start()
        self.workers.append(worker)
        await until(lambda: self.gateway.fleet.knows(worker_id), f"heartbeat of {worker_id}")
        return worker

    async def decode(self, worker_id: str = "decode-1") -> FakeWorker:
        return await self.worker(worker_id, "decode")

    async def prefill(self, worker_id: str = "prefill-1") -> FakeWorker:
        return await self.worker(worker_id, "prefill")

    async def coordinator(self, placement: Placement) -> FakeCoordinator:
        coordinator = await FakeCoordinator(self.bus).start()
        coordinator.placement = placement
        return coordinator

    async def post(self, path: str, body: object, **options: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a stream, parsed; "[DONE]" stays text."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return parse_events(await response.text())

    def gateway_routes(self) -> list[web.AbstractRoute]:
        return list(self._app.router.routes())

    def openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        self.gateway.telemetry.flush()
        return self._spans.get_finished_spans()

    async def is_idle(self) -> None:
        """Nothing is held: no slot, no inbox."""
        await until(lambda: self.gateway.admission.inflight == 0, "no request in flight")
        assert self.gateway.num_open == 0


def parse_events(text: str) -> list[Any]:
    """Data of server-sent events; comments are skipped, as clients do."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks), text
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def chat(content: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def completion(prompt: Any = "Once", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


@asynccontextmanager
async def rig(nats_url: str, tmp_path: Path, **settings: Any) -> AsyncIterator[Rig]:
    """A gateway that serves; closed, and checked to hold nothing, at the end."""
    defaults = Settings(nats_url=nats_url, state_dir=tmp_path, port=0, drain_timeout_s=5.0, recovery_s=0.3)
    spans = InMemorySpanExporter()
    telemetry = Telemetry("gateway", "gw-test", spans)
    model = Model(MODEL, FINGERPRINT, CONTEXT, text_model())
    async with (
        await Bus.connect(nats_url, "gw-test") as bus,
        await Bus.connect(nats_url, "workers") as workers_bus,
    ):
        gateway = Gateway("gw-test", replace(defaults, **settings), model, bus, telemetry)
        runner = make_runner(gateway)
        await gateway.start()
        url = await listen(runner, "127.0.0.1", 0)
        gateway.address = url
        made = Rig(workers_bus, gateway, runner.app, url, spans)
        try:
            yield made
        finally:
            await made.session.close()
            await runner.cleanup()
            await gateway.close()
            for worker in made.workers:
                await worker.die()
            telemetry.shutdown()
