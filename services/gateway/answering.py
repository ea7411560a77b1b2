"""POST /v1/chat/completions, /v1/completions and /v1/messages: one request's way through the gateway.

admit -> read and check -> tokenise -> place and submit -> text as it comes, or all at the end
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aiohttp import web
from aiohttp.web_exceptions import HTTPRequestEntityTooLarge
from pydantic import ValidationError

from libs.service.logs import get_logger
from libs.wire.errors import BatonError, Code
from libs.wire.messages import Cached
from services.gateway.admission import Admission
from services.gateway.api import anthropic, chat, completions
from services.gateway.api.errors import ApiError, from_failure, from_validation, model_not_found, unexpected
from services.gateway.api.messages import MessagesWriter
from services.gateway.api.writer import Heading, Writer
from services.gateway.exchange import Exchange, Operation
from services.gateway.job import Job, Order, Outcome
from services.gateway.lifecycle import Life
from services.gateway.offload import Offload
from services.gateway.parts import Parts
from services.gateway.prepare import Preparer
from services.gateway.sse import KEEPALIVE, ClientGone, EventStream, is_gone
from services.gateway.transcript import Piece

BODY_TIMEOUT_S: Final = 30.0
KEEPALIVE_S: Final = 10.0
LOOK_S: Final = 0.5  # between two looks at whether the client is still there
log = get_logger()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What distinguishes one completion endpoint from another."""

    operation: Operation
    read_order: Callable[[bytes], Order]
    writer: Callable[[Heading, bool], Writer]


CHAT: Final = Endpoint(
    "chat", chat.read_order, lambda heading, logprobs: chat.ChatWriter(heading, logprobs=logprobs)
)
COMPLETIONS: Final = Endpoint(
    "text_completion",
    completions.read_order,
    lambda heading, logprobs: completions.CompletionWriter(heading, logprobs=logprobs),
)
MESSAGES: Final = Endpoint("chat", anthropic.read_order, lambda heading, logprobs: MessagesWriter(heading))


@dataclass(frozen=True, slots=True)
class Served:
    """The model, as clients know it."""

    name: str
    fingerprint: str
    context_length: Callable[[], int]


class Answering:
    """Handles both endpoints. Whatever happens, a request's slot, inbox and workers are given back."""

    def __init__(
        self,
        parts: Parts,
        admission: Admission,
        preparer: Preparer,
        offload: Offload,
        served: Served,
        *,
        request_timeout_s: float,
    ) -> None:
        self._parts = parts
        self._admission = admission
        self._preparer = preparer
        self._offload = offload
        self._served = served
        self._request_timeout_s = request_timeout_s

    async def handle(
        self, request: web.Request, exchange: Exchange, endpoint: Endpoint, tenant: str
    ) -> web.StreamResponse:
        """The answer, with what `tenant` has cached.

        Raises ApiError or BatonError while nothing was sent, ClientGone when nobody reads.
        """
        with self._admission.slot():
            order = await self._order(request, endpoint)
            exchange.ordered(order)
            if order.model != self._served.name:
                raise model_not_found(order.model)
            prompt, since_ns = await self._preparer.tokenize(order, exchange.arrived_ns, exchange.context)
            exchange.tokenized(len(prompt))
            job = self._job(exchange, order, prompt, tenant)
            heading = self._heading(exchange, order, len(prompt))
            writer = endpoint.writer(heading, order.sampling.logprobs is not None)
            echo = Piece(order.echo(self._parts.text)) if order.echo is not None else Piece("")
            if job.limits.max_tokens == 0:
                return await _nothing_generated(request, order, writer, echo, len(prompt))
            life = Life(self._parts, job, exchange.context)
            exchange.lives(life)
            try:
                await life.start(since_ns)
                if order.stream:
                    return await _stream(request, exchange, life, writer, echo)
                return await _whole(request, life, writer, echo)
            finally:
                life.close()

    async def _order(self, request: web.Request, endpoint: Endpoint) -> Order:
        body = await body_of(request)
        try:
            return await self._offload.run(lambda: endpoint.read_order(body), weight=len(body) // 8)
        except ValidationError as error:
            raise from_validation(error) from None

    def _job(self, exchange: Exchange, order: Order, prompt: tuple[int, ...], tenant: str) -> Job:
        return Job(
            request_id=exchange.request_id,
            tenant=tenant,
            prompt=prompt,
            sampling=order.sampling,
            limits=self._preparer.limits(order, len(prompt), self._served.context_length()),
            stops=order.stops,
            arrived_ns=exchange.arrived_ns,
            deadline_ns=exchange.arrived_ns + int(self._request_timeout_s * 1e9),
        )

    def _heading(self, exchange: Exchange, order: Order, prompt_tokens: int) -> Heading:
        return Heading(
            request_id=exchange.request_id,
            created=exchange.arrived_ns // 1_000_000_000,
            model=self._served.name,
            fingerprint=f"fp_{self._served.fingerprint[:12]}",
            include_usage=order.include_usage,
            prompt_tokens=prompt_tokens,
        )


async def body_of(request: web.Request) -> bytes:
    """The whole body. Raises ApiError for one that is too large, too slow, or broken."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", code="timeout") from None
    except HTTPRequestEntityTooLarge:
        limit = request.client_max_size
        raise ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large") from None
    except web.RequestPayloadError as error:
        raise ApiError(400, f"the body cannot be read: {error}", code="invalid_body") from None


async def _whole(request: web.Request, life: Life, writer: Writer, echo: Piece) -> web.Response:
    pieces = [echo]
    while (outcome := life.outcome()) is None:
        if piece := await _read(request, life, LOOK_S):
            pieces.append(piece)
    return _json(writer.whole(pieces, outcome))


async def _stream(
    request: web.Request, exchange: Exchange, life: Life, writer: Writer, echo: Piece
) -> web.StreamResponse:
    """Nothing is sent before there is text (or much time has passed), so that a failure can have a status."""
    stream = EventStream(request)
    try:
        await _copy(request, life, writer, stream, writer.opening() + writer.piece(echo))
    except BatonError as failure:
        if not stream.started:
            raise
        error, code = from_failure(failure, exchange.request_id), str(failure.code)
    except (asyncio.CancelledError, ConnectionError, ClientGone):
        raise
    except Exception:
        if not stream.started:
            raise
        log.exception("answering failed")
        error, code = unexpected(exchange.request_id), str(Code.INTERNAL)
    else:
        return await stream.end()
    exchange.failed(code)
    await stream.send(writer.failure(error))
    return await stream.end(failed=True)


async def _read(request: web.Request, life: Life, wait_s: float) -> Piece | None:
    """Raises ClientGone, within `LOOK_S`, when nobody waits for the text any more."""
    if is_gone(request):
        raise ClientGone("the client hung up")
    return await life.read(min(wait_s, LOOK_S))


async def _copy(request: web.Request, life: Life, writer: Writer, stream: EventStream, head: bytes) -> None:
    sent_s = time.monotonic()
    while life.outcome() is None:
        piece = await _read(request, life, max(0.0, sent_s + KEEPALIVE_S - time.monotonic()))
        data = writer.piece(piece) if piece is not None else b""
        if (outcome := life.outcome()) is not None:
            data += writer.closing(outcome)
        elif not data and time.monotonic() - sent_s >= KEEPALIVE_S:
            data = KEEPALIVE
        if data:
            await stream.send(head + data)
            head, sent_s = b"", time.monotonic()


async def _nothing_generated(
    request: web.Request, order: Order, writer: Writer, echo: Piece, prompt_tokens: int
) -> web.StreamResponse:
    """max_tokens 0: no worker is needed."""
    outcome = Outcome(
        finish_reason="length", prompt_tokens=prompt_tokens, completion_tokens=0, cached=Cached(tokens=0)
    )
    if not order.stream:
        return _json(writer.whole([echo], outcome))
    stream = EventStream(request)
    await stream.send(writer.opening() + writer.piece(echo) + writer.closing(outcome))
    return await stream.end()


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
