"""One subscription: decodes, runs the handler in order, replies, and counts what it could not keep."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.errors import Error as NatsError
from opentelemetry.context import Context, attach, detach

from libs.service.bus_messages import refusal
from libs.service.logs import get_logger
from libs.service.telemetry import extract
from libs.wire.codec import decode
from libs.wire.errors import BatonError, Code, DecodeError
from libs.wire.messages import Message, Refused

_log = get_logger(__name__)

MAX_PENDING = 65536  # messages that wait for one handler
PENDING_BYTES = 64 * 1024 * 1024  # of one subscription; what comes beyond it is dropped and counted


@dataclass(frozen=True, slots=True)
class Incoming:
    """Where a message came from. `context` holds the sender's span, or nothing."""

    subject: str
    context: Context
    wants_reply: bool


M = TypeVar("M", bound=Message)
Handler = Callable[[M, Incoming], Awaitable[Message | None]]


@dataclass(slots=True)
class BusStats:
    """What went wrong on one Bus since it was opened, counted in messages."""

    malformed: int = 0
    dropped: int = 0
    handler_errors: int = 0


class Replier(Protocol):
    async def __call__(self, subject: str, message: Message, *, context: Context | None = None) -> None: ...


class Subscription:
    """Made by `Bus.subscribe`. `dropped` counts messages lost because the handler was too slow.

    `on_dropped(dropped)` is called when messages begin to be dropped, and again when the handler has caught
    up: then is the moment to fetch what was missed.
    """

    def __init__(
        self,
        subject: str,
        kinds: tuple[type[Message], ...],
        handler: Handler[Any],
        *,
        queue: str,
        max_pending: int,
        on_dropped: Callable[[int], None] | None,
        reply: Replier,
        stats: BusStats,
        forget: Callable[[Subscription], None],
    ) -> None:
        self.subject = subject
        self.dropped = 0
        self._kinds = kinds
        self._handler = handler
        self._queue = queue
        self._max_pending = max_pending
        self._on_dropped = on_dropped
        self._reply = reply
        self._stats = stats
        self._forget = forget
        self._overrun = False
        self._inner: NatsSubscription | None = None

    @property
    def pending(self) -> int:
        """Messages received and not handled yet."""
        return self._inner.pending_msgs if self._inner else 0

    def is_served_by(self, inner: NatsSubscription) -> bool:
        return self._inner is inner

    async def attach(self, client: Client) -> None:
        self._inner = await client.subscribe(
            self.subject,
            queue=self._queue,
            cb=self._receive,
            pending_msgs_limit=self._max_pending,
            pending_bytes_limit=PENDING_BYTES,
        )

    async def unsubscribe(self) -> None:
        """No message is handled after this; those still waiting are discarded. Idempotent."""
        self._forget(self)
        inner, self._inner = self._inner, None
        if inner is not None:
            try:
                await inner.unsubscribe()
            except NatsError as error:  # the connection is closed or closing: nothing is delivered any more
                _log.debug("unsubscribe failed", subject=self.subject, error=str(error))

    async def drain(self) -> None:
        """Takes no new message, and returns when those that wait are handled."""
        if self._inner is not None:
            await self._inner.drain()  # type: ignore[no-untyped-call]

    def note_drop(self) -> None:
        self.dropped += 1
        self._stats.dropped += 1
        if not self._overrun:
            self._overrun = True
            _log.warning("handler too slow; dropping messages", subject=self.subject, pending=self.pending)
            self._report_drops()

    def _report_drops(self) -> None:
        if self._on_dropped is not None:
            try:
                self._on_dropped(self.dropped)
            except Exception:
                _log.exception("on_dropped failed", subject=self.subject)

    async def _receive(self, msg: Msg) -> None:
        incoming = Incoming(msg.subject, extract(msg.headers or {}), bool(msg.reply))
        token = attach(incoming.context)
        try:
            reply = await self._handle(msg.data, incoming)
            if reply is not None and msg.reply:
                await self._send_reply(msg.reply, reply)
        finally:
            detach(token)
            structlog.contextvars.clear_contextvars()  # what one message bound must not label the next one
        if self._overrun and self.pending <= self._max_pending // 2:
            self._overrun = False
            _log.info("handler caught up", subject=self.subject, dropped=self.dropped)
            self._report_drops()

    async def _handle(self, data: bytes, incoming: Incoming) -> Message | None:
        """What to reply. Nothing a handler raises gets out, or nats-py would end the subscription."""
        try:
            message = decode(data, *self._kinds)
        except DecodeError as error:
            self._stats.malformed += 1
            _log.warning(
                "malformed message", subject=incoming.subject, size_bytes=len(data), error=error.message
            )
            return refusal(error)
        try:
            return await self._handler(message, incoming)
        except BatonError as error:
            if not incoming.wants_reply:
                self._stats.handler_errors += 1
                _log.warning("handler failed", subject=incoming.subject, code=error.code, error=error.message)
            return refusal(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return self._failed(incoming)  # something the handler awaited was cancelled, not we
        except Exception:
            return self._failed(incoming)

    def _failed(self, incoming: Incoming) -> Refused:
        self._stats.handler_errors += 1
        _log.exception("handler failed", subject=incoming.subject)
        return _internal(incoming.subject)

    async def _send_reply(self, subject: str, reply: Message) -> None:
        try:
            await self._reply(subject, reply)
        except (BatonError, TypeError, ValueError, OverflowError) as error:
            self._stats.handler_errors += 1
            _log.error("cannot reply", subject=self.subject, kind=type(reply).__name__, error=str(error))
            if not isinstance(reply, Refused):
                await self._send_reply(subject, _internal(self.subject))


def _internal(subject: str) -> Refused:
    return Refused(code=Code.INTERNAL, message=f"internal error on {subject}", retryable=False)
