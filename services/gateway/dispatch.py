"""What workers say about this gateway's requests, sorted into one bounded inbox per request.

    StepOutput --deliver--> Dispatcher --put--> Inbox --take--> the request's handler

Everything that cannot be trusted stops here: outputs of older attempts or of another worker are dropped,
duplicate tokens are dropped, and a missing token becomes a `Failed`, because a text with a hole is wrong.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from libs.wire.errors import Code
from libs.wire.messages import Delta, Failed, Finished, StepOutput

Irregularity = Literal["unknown", "stale", "duplicate", "gap", "lost", "overflow"]


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker that this request was given to is gone, with all it knew."""

    worker_id: str
    reason: str


Item = Delta | Finished | Failed | WorkerLost


class Inbox:
    """What one request's handler has still to read: at most `max_tokens` tokens and one end per attempt."""

    def __init__(self, request_id: str, max_tokens: int, count: Callable[[Irregularity], None]) -> None:
        self.request_id = request_id
        self.attempt = 0
        self.decode: str | None = None  # None: whichever worker of the queue group answers
        self.prefill: str | None = None
        self._max_tokens = max_tokens
        self._count = count
        self._items: deque[Item] = deque()
        self._next_seq = 0
        self._ended = False
        self._heard_s = 0.0  # when its workers last said something, or were given it (monotonic)
        self._wake = asyncio.Event()

    def expect(self, attempt: int, decode: str | None, prefill: str | None, next_seq: int = 0) -> None:
        """Begins an attempt: only its outputs count from now on, the first of which is token `next_seq`."""
        self.attempt, self.decode, self.prefill = attempt, decode, prefill
        self._items.clear()
        self._next_seq = next_seq
        self._ended = False
        self._heard_s = time.monotonic()

    @property
    def next_seq(self) -> int:
        """Number of the next token: so many have arrived."""
        return self._next_seq

    def is_quiet(self, now_s: float, quiet_s: float) -> bool:
        """Nothing has come for `quiet_s`, though something must."""
        return not self._ended and bool(self.attempt) and now_s - self._heard_s >= quiet_s

    async def take(self, timeout_s: float) -> list[Item]:
        """All that has arrived, in order; waits up to `timeout_s` for the first. Empty: nothing came."""
        if not self._items:
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return []
        items = list(self._items)
        self._items.clear()
        return items

    def put(self, worker_id: str, output: Delta | Finished | Failed) -> None:
        """Takes an output in, unless it is no longer, or not yet, part of the answer."""
        if output.attempt != self.attempt or self._ended or self.decode not in (None, worker_id):
            self._count("stale")
            return
        self._heard_s = time.monotonic()
        if isinstance(output, Delta):
            self._put_delta(output)
        elif isinstance(output, Finished) and output.num_tokens != self._next_seq:
            self._fail("gap", f"{output.num_tokens} tokens were sent and {self._next_seq} arrived")
        else:
            self._end(output)

    def worker_lost(self, worker_id: str, reason: str) -> None:
        if worker_id in (self.decode, self.prefill) and not self._ended:
            self._add(WorkerLost(worker_id, reason))

    def lost(self, problem: str) -> None:
        """Ends the attempt: something of its answer will never arrive."""
        if not self._ended:
            self._fail("lost", problem)

    def fail(self, code: Code, message: str, *, retryable: bool) -> None:
        """Ends the attempt from this side."""
        if not self._ended:
            self._end(
                Failed(
                    request_id=self.request_id,
                    attempt=self.attempt,
                    code=code,
                    message=message,
                    retryable=retryable,
                )
            )

    def _put_delta(self, delta: Delta) -> None:
        known = self._next_seq - delta.seq
        if known < 0:
            self._fail("gap", f"token {self._next_seq} is missing; token {delta.seq} came")
            return
        if known > 0:
            self._count("duplicate")
            if known >= len(delta.tokens):
                return
            delta = msgspec.structs.replace(delta, seq=self._next_seq, tokens=delta.tokens[known:])
        self._next_seq += len(delta.tokens)
        if self._next_seq > self._max_tokens:
            self._fail("overflow", f"more than the {self._max_tokens} tokens that were asked for came")
            return
        self._add(delta)

    def _fail(self, kind: Irregularity, problem: str) -> None:
        """Messages were lost on the way, which says nothing against the worker; too many tokens do."""
        self._count(kind)
        is_lost = kind in ("gap", "lost")
        code = Code.WORKER_LOST if is_lost else Code.INTERNAL
        self.fail(code, f"the answer arrived damaged: {problem}", retryable=is_lost)

    def _end(self, output: Finished | Failed) -> None:
        self._ended = True
        self._add(output)

    def _add(self, item: Item) -> None:
        self._items.append(item)
        self._wake.set()


class Dispatcher:
    """All open inboxes. `count` is told of every output that was not passed on as it came."""

    def __init__(self, count: Callable[[Irregularity], None]) -> None:
        self._count = count
        self._open: dict[str, Inbox] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request_id: str, max_tokens: int) -> Inbox:
        """The inbox of a new request. Whoever opens it closes it."""
        if request_id in self._open:
            raise ValueError(f"request {request_id} is open already")
        inbox = Inbox(request_id, max_tokens, self._count)
        self._open[request_id] = inbox
        return inbox

    def is_waiting(self, request_id: str, attempt: int) -> bool:
        """Outputs of this attempt are still of use."""
        inbox = self._open.get(request_id)
        return inbox is not None and inbox.attempt == attempt

    def close(self, request_id: str) -> None:
        """Idempotent; what arrives later is dropped and counted."""
        self._open.pop(request_id, None)

    def quiet(self, quiet_s: float) -> list[Inbox]:
        """Those that wait for a worker which has said nothing of them for `quiet_s`."""
        now_s = time.monotonic()
        return [inbox for inbox in self._open.values() if inbox.decode and inbox.is_quiet(now_s, quiet_s)]

    def deliver(self, message: StepOutput) -> None:
        for output in message.outputs:
            inbox = self._open.get(output.request_id)
            if inbox is None:
                self._count("unknown")
            else:
                inbox.put(message.worker_id, output)

    def worker_lost(self, worker_id: str, reason: str) -> None:
        """Tells every request that this worker had."""
        for inbox in list(self._open.values()):
            inbox.worker_lost(worker_id, reason)

    def fail_all(self, code: Code, message: str) -> None:
        """Ends every open request, for good."""
        for inbox in list(self._open.values()):
            inbox.fail(code, message, retryable=False)
