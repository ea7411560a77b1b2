"""Typed messages over NATS: publish, request, gather, subscribe. Every wait has a deadline.

What NATS itself does not tell: a responder that dies looks like one that is slow (DeadlineExceeded); a message
larger than the server's `max_payload` makes the server hang up, so it is refused here before it is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, overload

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.errors import ConnectionClosedError, NoRespondersError, OutboundBufferLimitError
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.api import Header
from opentelemetry.context import Context

from libs.service.bus_connection import PENDING_LIMIT_BYTES, Connection, finish_within
from libs.service.bus_messages import bus_error, decode_reply, wire_size
from libs.service.bus_subscription import MAX_PENDING, BusStats, Handler, Incoming, Subscription
from libs.service.logs import get_logger
from libs.service.telemetry import inject
from libs.wire.codec import encode
from libs.wire.errors import (
    BusError,
    DeadlineExceeded,
    DecodeError,
    MessageTooLarge,
    NoResponder,
    RequestRefused,
)
from libs.wire.messages import Message

__all__ = ["Bus", "BusStats", "Incoming", "Subscription"]

_log = get_logger(__name__)
_FLUSH_TIMEOUT_S = 2

M = TypeVar("M", bound=Message)
N = TypeVar("N", bound=Message)


class Bus:
    """A process's connection to the others. Opened with `connect`, ended with `drain` or `close`."""

    def __init__(self, url: str, name: str) -> None:
        self.stats = BusStats()
        self._subscriptions: list[Subscription] = []
        self._closed = False
        self._connection = Connection(
            url, name, on_new_client=self._attach_all, on_slow_consumer=self._note_drop
        )

    @classmethod
    async def connect(cls, url: str, name: str, *, timeout_s: float = 10) -> Bus:
        """Raises BusError, which names the address, when no server is there within `timeout_s`."""
        bus = cls(url, name)
        await bus._connection.open(timeout_s)
        return bus

    async def __aenter__(self) -> Bus:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def is_connected(self) -> bool:
        return self._connection.is_connected

    @property
    def max_payload(self) -> int:
        """The largest message in bytes, headers included, that the server takes."""
        return self._client.max_payload

    async def publish(self, subject: str, message: Message, *, context: Context | None = None) -> None:
        """Hands `message` to the connection; delivery is at most once. While the server is away, up to
        `PENDING_LIMIT_BYTES` wait for it.

        Raises MessageTooLarge, or BusError when no more can wait or the bus is closed.
        """
        data, headers = self._prepare(subject, message, context)
        await self._make_room(subject, len(data))
        try:
            await self._client.publish(subject, data, headers=headers)
        except NatsError as error:
            raise bus_error(subject, error) from error

    async def request(
        self,
        subject: str,
        message: Message,
        *kinds: type[M],
        timeout_s: float,
        context: Context | None = None,
    ) -> M:
        """The reply, one of `kinds`.

        Raises RequestRefused when the reply is Refused, NoResponder at once when nobody listens,
        DeadlineExceeded, MessageTooLarge, DecodeError for a malformed reply, or BusError.
        """
        data, headers = self._prepare(subject, message, context)
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        # Not buffered while the server is away: a request must not be acted on after its requester gave up.
        if not await self._connection.wait_until_up(timeout_s):
            raise self._not_up(subject, timeout_s)
        await self._make_room(subject, len(data))
        try:
            reply = await self._client.request(
                subject, data, timeout=max(0.001, deadline - clock()), headers=headers
            )
        except NoRespondersError:
            raise NoResponder(subject) from None
        except NatsTimeoutError:
            raise DeadlineExceeded(subject, timeout_s) from None
        except NatsError as error:
            raise bus_error(subject, error) from error
        return decode_reply(reply.data, kinds)

    async def gather(
        self,
        subject: str,
        message: Message,
        kind: type[M],
        *,
        window_s: float,
        context: Context | None = None,
    ) -> list[M]:
        """All replies that come within `window_s`; empty at once when nobody listens. Refusals are left out."""
        data, headers = self._prepare(subject, message, context)
        if not await self._connection.wait_until_up(window_s):
            raise self._not_up(subject, window_s)
        replies: list[M] = []
        nobody = asyncio.Event()

        async def collect(msg: Msg) -> None:
            if not msg.data and (msg.headers or {}).get(Header.STATUS) == "503":
                nobody.set()
                return
            try:
                replies.append(decode_reply(msg.data, (kind,)))
            except (RequestRefused, DecodeError) as error:
                self.stats.malformed += isinstance(error, DecodeError)
                _log.warning("reply left out", subject=subject, code=error.code, error=error.message)

        client = self._client
        try:
            inbox = client.new_inbox()
            inner = await client.subscribe(inbox, cb=collect)
            try:
                await client.publish(subject, data, reply=inbox, headers=headers)
                await finish_within(nobody.wait(), window_s)
            finally:
                await inner.unsubscribe()
        except NatsError as error:
            if not replies:
                raise bus_error(subject, error) from error
        return replies

    @overload
    async def subscribe(
        self,
        subject: str,
        kinds: tuple[type[M]],
        handler: Handler[M],
        *,
        queue: str = "",
        max_pending: int = MAX_PENDING,
        on_dropped: Callable[[int], None] | None = None,
    ) -> Subscription: ...

    @overload
    async def subscribe(
        self,
        subject: str,
        kinds: tuple[type[M], type[N]],
        handler: Handler[M | N],
        *,
        queue: str = "",
        max_pending: int = MAX_PENDING,
        on_dropped: Callable[[int], None] | None = None,
    ) -> Subscription: ...

    async def subscribe(
        self,
        subject: str,
        kinds: tuple[type[Message], ...],
        handler: Handler[Any],
        *,
        queue: str = "",
        max_pending: int = MAX_PENDING,
        on_dropped: Callable[[int], None] | None = None,
    ) -> Subscription:
        """Runs `handler` for each message, one after the other, in order. When this returns, the server knows.

        What the handler returns is the reply; a BatonError it raises becomes a Refused reply, any other
        exception Refused(internal); neither ends the subscription. A message that is none of `kinds` is
        counted, logged and refused. Beyond `max_pending` waiting messages, new ones are dropped: see
        `Subscription`; keep it above 1000, as one read of the socket brings hundreds. Raises BusError when
        the bus is closed.
        """
        subscription = Subscription(
            subject,
            kinds,
            handler,
            queue=queue,
            max_pending=max_pending,
            on_dropped=on_dropped,
            reply=self.publish,
            stats=self.stats,
            forget=self._forget,
        )
        try:
            await subscription.attach(self._client)
            self._subscriptions.append(subscription)
            await self._flush()
        except NatsError as error:
            raise bus_error(subject, error) from error
        return subscription

    async def drain(self, timeout_s: float = 5.0) -> None:
        """Takes no more messages, handles those that came, sends what is buffered, and closes.

        What is not done after `timeout_s` is cut off. Idempotent.
        """
        if self.is_connected and not self._closed:
            drains = [asyncio.ensure_future(each.drain()) for each in self._subscriptions]
            if drains:
                _, late = await asyncio.wait(drains, timeout=timeout_s)
                for task in late:
                    task.cancel()
                if late:
                    _log.warning("cut off handlers that did not end", count=len(late), timeout_s=timeout_s)
                await asyncio.gather(*drains, return_exceptions=True)
        await self.close()

    async def close(self) -> None:
        """Closes at once; handlers that run are cancelled. Idempotent."""
        self._closed = True
        await self._connection.close()

    @property
    def _client(self) -> Client:
        return self._connection.client

    def _prepare(
        self, subject: str, message: Message, context: Context | None
    ) -> tuple[bytes, dict[str, str] | None]:
        data = encode(message)
        headers = inject(context)
        size = wire_size(data, headers)
        if size > self.max_payload:
            raise MessageTooLarge(subject, size, self.max_payload)
        return data, headers or None

    async def _make_room(self, subject: str, size: int) -> None:
        """Waits until `size` bytes may be buffered. Raises BusError when the server does not read."""
        if self._client.pending_data_size + size <= PENDING_LIMIT_BYTES:
            return
        if self.is_connected:
            try:
                await self._client.flush(timeout=_FLUSH_TIMEOUT_S)
            except NatsError as error:
                raise bus_error(subject, error) from error
        if self._client.pending_data_size + size > PENDING_LIMIT_BYTES:
            raise bus_error(subject, OutboundBufferLimitError())

    async def _flush(self) -> None:
        """Returns when the server has read all that was sent before.

        Twice, because nats-py writes a PING ahead of what it still buffers.
        """
        if self.is_connected:
            await self._client.flush(timeout=_FLUSH_TIMEOUT_S)
            await self._client.flush(timeout=_FLUSH_TIMEOUT_S)

    def _not_up(self, subject: str, timeout_s: float) -> BusError:
        if self._closed:
            return bus_error(subject, ConnectionClosedError())
        return DeadlineExceeded(subject, timeout_s)

    def _forget(self, subscription: Subscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    async def _attach_all(self, client: Client) -> None:
        for subscription in list(self._subscriptions):
            await subscription.attach(client)

    def _note_drop(self, inner: NatsSubscription) -> None:
        for subscription in self._subscriptions:
            if subscription.is_served_by(inner):
                subscription.note_drop()
