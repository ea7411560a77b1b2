"""What synchronous code wants published: a bounded queue and one task that sends in order."""

from __future__ import annotations

import asyncio

from opentelemetry.context import Context

from libs.service.bus import Bus
from libs.service.logs import get_logger
from libs.wire.errors import BatonError
from libs.wire.messages import Message

log = get_logger()


class Outbox:
    """Publishes in the order of `put`. What cannot be sent is counted and logged: its reader has a deadline."""

    def __init__(self, bus: Bus, max_messages: int = 65536) -> None:
        self._bus = bus
        self._queue: asyncio.Queue[tuple[str, Message, Context | None]] = asyncio.Queue(max_messages)
        self.num_dropped = 0

    def put(self, subject: str, message: Message, context: Context | None = None) -> None:
        """Never blocks. With the queue full (the bus has been gone for long) the message is dropped and counted."""
        try:
            self._queue.put_nowait((subject, message, context))
        except asyncio.QueueFull:
            self.num_dropped += 1

    async def run(self) -> None:
        """Sends until cancelled."""
        while True:
            subject, message, context = await self._queue.get()
            try:
                await self._bus.publish(subject, message, context=context)
            except BatonError as error:
                self.num_dropped += 1
                log.warning("message dropped", subject=subject, error=error.message)
            finally:
                self._queue.task_done()

    async def flush(self, timeout_s: float) -> None:
        """Waits until all that was put is handed to the bus, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._queue.join()
        except TimeoutError:
            log.warning("messages left unsent", count=self._queue.qsize())
