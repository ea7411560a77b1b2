"""The bus against a real nats-server: delivery, refusals, limits, and what happens when things break."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from libs.service import bus as bus_module
from libs.service import bus_connection
from libs.service.bus import Bus, Incoming
from libs.service.bus_connection import PENDING_LIMIT_BYTES
from libs.service.telemetry import extract, trace_id_of
from libs.wire.errors import (
    BusError,
    Code,
    DeadlineExceeded,
    MessageTooLarge,
    NoResponder,
    RequestRefused,
)
from libs.wire.messages import Accepted, DumpRequest, Message, Pin, Release, StatusRequest
from tests.natsd import port_of, start_nats, stop_nats

PATIENCE_S = 20.0


class Server:
    """A nats-server that a test may stop and start again at the same address."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.url, self.process = start_nats(home)

    def restart(self) -> None:
        self.stop()
        self.url, self.process = start_nats(self._home, port=port_of(self.url))

    def stop(self) -> None:
        stop_nats(self.process)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path)
    yield running
    running.stop()


@pytest.fixture
async def buses(server: Server) -> AsyncIterator[tuple[Bus, Bus]]:
    async with await Bus.connect(server.url, "left") as left, await Bus.connect(server.url, "right") as right:
        yield left, right


async def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"never: {what}"
        await asyncio.sleep(0.01)


async def accept(message: Message, incoming: Incoming) -> Message:
    return Accepted(worker_id="w")


def lease(number: int) -> Release:
    return Release(lease_id=str(number))


class Log:
    """A handler that keeps what it is given."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    async def __call__(self, message: Release, incoming: Incoming) -> None:
        self.ids.append(message.lease_id)

    def has(self, id: str) -> bool:
        return id in self.ids


class TestDelivery:
    async def test_reply(self, buses: tuple[Bus, Bus]) -> None:
        left, right = buses
        await right.subscribe("s", (Release,), accept)
        assert await left.request("s", lease(1), Accepted, timeout_s=5) == Accepted(worker_id="w")

    async def test_published_messages_arrive_in_order(self, buses: tuple[Bus, Bus]) -> None:
        left, right = buses
        log = Log()
        await right.subscribe("s", (Release,), log)
        for number in range(3000):
            await left.publish("s", lease(number))
        await eventually(lambda: len(log.ids) == 3000, "all arrived")
        assert log.ids == [str(number) for number in range(3000)]

    async def test_the_server_knows_a_subscription_when_subscribe_returns(
        self, buses: tuple[Bus, Bus]
    ) -> None:
        left, right = buses
        for number in range(200):
            subscription = await right.subscribe(f"s.{number}", (Release,), accept)
            await left.request(f"s.{number}", lease(number), Accepted, timeout_s=5)
            await subscription.unsubscribe()

    async def test_two_kinds_on_one_subject(self, buses: tuple[Bus, Bus]) -> None:
        left, right = buses
        seen: list[Message] = []

        async def handler(message: Release | DumpRequest, incoming: Incoming) -> None:
            seen.append(message)

        await right.subscribe("s", (Release, DumpRequest), handler)
        await left.publish("s", DumpRequest(offset=7))
        await left.publish("s", lease(1))
        await eventually(lambda: len(seen) == 2, "both kinds")
        assert seen == [DumpRequest(offset=7), lease(1)]

    async def test_one_of_a_queue_group_takes_each_message(self, buses: tuple[Bus, Bus]) -> None:
        left, right = buses
        logs = Log(), Log()
        for log in logs:
            await right.subscribe("s", (Release,), log, queue="workers")
        for number in range(50):
            await left.publish("s", lease(number))
        await eventually(lambda: sum(len(log.ids) for log in logs) >= 50, "all arrived")
        await asyncio.sleep(0.05)
        assert sorted(logs[0].ids + logs[1].ids, key=int) == [str(number) for number in range(50)]

    async def test_nothing_arrives_after_unsubscribe(self, buses: tuple[Bus, Bus]) -> None:
        left, right = buses
        log, other = Log(), Log()
        subscription = await right.subscribe("s", (Release,), log)
        await right.subscribe("s", (Release,), other)
        await left.publish("s", lease(1))
        await eventually(lambda: bool(log.ids), "first message")
        await subscription.unsubscribe()
        await subscription.unsubscribe()
        await left.publish("s", lease(2))
        await eventually(lambda: len(other.ids) == 2, "second message, elsewhere")
        assert log.ids == ["1"]

    async def test_gather_takes_all_replies_of_the_window(
        self, server: Server, buses: tuple[Bus, Bus]
    ) -> None:
        left, right = buses

        async def refuse(message: StatusRequest, incoming: Incoming) -> Message:
            raise RequestRefused(Code.DRAINING, "going", retryable=True)

        async def another_kind(message: StatusRequest, incoming: Incoming) -> Message:
            return lease(1)

        for handler in (accept, accept, refuse, another_kind):
            await right.subscribe("status", (StatusRequest,), handler)
        replies = await left.gather("status", StatusRequest(), Accepted, window_s=0.5)
        assert replies == [Accepted(worker_id="w")] * 2
        assert left.stats.malformed == 1

    async def test_gather_is_empty_at_once_when_nobody_listens(self, buses: tuple[Bus, Bus]) -> None:
        assert (
            await asyncio.wait_for(
                buses[0].gather("nobody", StatusRequest(), Accepted, window_s=60), PATIENCE_S
            )
            == []
        )


class TestRefusals:
    async def test_a_refusal_keeps_its_fields(self, buses: tuple[Bus, Bus]) -> None:
        left, right = buses

        async def full(message: Release, incoming: Incoming) -> Message:
            raise RequestRefused(Code.OVERLOADED, "queue is full", retryable=True, retry_after_s=1.5)

        await right.subscribe("s", (Release,), full)
        with pytest.raises(RequestRefused, match="queue is full") as caught:
            await left.request("s", lease(1), Accepted, timeout_s=5)
        assert (caught.value.code, caught.value.retryable, caught.value.retry_after_s) == (
            Code.OVERLOADED,
            True,
            1.5,
        )

    @pytest.mark.parametrize("error", [ValueError("secret"), asyncio.CancelledError(), KeyError("x")])
    async def test_a_handler_that_raises_is_refused_and_goes_on(
        self, buses: tuple[Bus, Bus], error: BaseException
    ) -> None:
        left, right = buses

        async def fails(message: Release, incoming: Incoming) -> Message:
            if message.lease_id == "1":
                raise error
            return Accepted(worker_id="w")

        await right.subscribe("s", (Release,), fails)
        with pytest.raises(RequestRefused, match="internal error") as caught:
            await left.request("s", lease(1), Accepted, timeout_s=5)
        assert caught.value.code == Code.INTERNAL
        assert "secret" not in caught.value.message
        assert right.stats.handler_errors == 1
        assert await left.request("s", lease(2), Accepted, timeout_s=5)

    async def test_a_malformed_message_is_counted_and_refused(self, buses: tuple[Bus, Bus]) -> None:
        left, right = buses
        log = Log()
        await right.subscribe("s", (Release,), log)
        with pytest.raises(RequestRefused, match="dump-request/1") as caught:
            await left.request("s", DumpRequest(), Accepted, timeout_s=5)
        assert caught.value.code == Code.BAD_MESSAGE
        assert right.stats.malformed == 1
        await left.publish("s", lease(1))
        await eventually(lambda: log.ids == ["1"], "the next message")

    async def test_a_reply_that_cannot_be_sent_is_a_refusal(self, buses: tuple[Bus, Bus]) -> None:
        left, right = buses

        async def handler(message: Release, incoming: Incoming) -> Message:
            return Accepted(worker_id="x" * 2_000_000 if message.lease_id == "1" else "\ud800")

        await right.subscribe("s", (Release,), handler)
        for number in (1, 2):
            with pytest.raises(RequestRefused, match="internal error"):
                await left.request("s", lease(number), Accepted, timeout_s=5)

    async def test_nobody_listens(self, buses: tuple[Bus, Bus]) -> None:
        with pytest.raises(NoResponder) as caught:
            await asyncio.wait_for(buses[0].request("s", lease(1), Accepted, timeout_s=60), PATIENCE_S)
        assert (caught.value.subject, caught.value.code, caught.value.retryable) == (
            "s",
            Code.NO_WORKER,
            True,
        )

    async def test_no_answer_in_time(self, buses: tuple[Bus, Bus]) -> None:
        left, right = buses
        await right.subscribe("s", (Release,), Log())  # never replies, like a responder that died
        with pytest.raises(DeadlineExceeded, match=r"0\.1 s"):
            await left.request("s", lease(1), Accepted, timeout_s=0.1)


class TestTraceContext:
    async def test_a_handler_gets_the_senders_context_and_hands_it_on(self, buses: tuple[Bus, Bus]) -> None:
        left, right = buses
        seen: list[str | None] = []

        async def second(message: DumpRequest, incoming: Incoming) -> None:
            seen.append(trace_id_of(incoming.context))

        async def first(message: Release, incoming: Incoming) -> Message:
            seen.append(trace_id_of(incoming.context))
            await right.publish("second", DumpRequest())  # in the current context
            structlog.contextvars.bind_contextvars(request_id=message.lease_id)
            return Accepted(worker_id="w")

        async def third(message: DumpRequest, incoming: Incoming) -> Message:
            assert structlog.contextvars.get_contextvars() == {}
            return Accepted(worker_id="w")

        await right.subscribe("first", (Release,), first)
        await left.subscribe("second", (DumpRequest,), second)
        header = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-03"}
        await left.request("first", lease(1), Accepted, timeout_s=5, context=extract(header))
        await eventually(lambda: len(seen) == 2, "both hops")
        assert seen == ["ab" * 16] * 2
        await left.request("first", lease(2), Accepted, timeout_s=5)  # no context: none left from before
        await eventually(lambda: len(seen) == 4, "both hops again")
        assert seen[2:] == [None, None]


class TestLimits:
    async def test_a_message_too_large_is_a_local_error_and_the_connection_survives(
        self, buses: tuple[Bus, Bus]
    ) -> None:
        """Cases row 59: a 16-token block of f16 KV fits into a message, a 64-token block does not."""
        left, right = buses
        await right.subscribe("s", (Pin,), accept)
        client_id = left._client.client_id

        def pin(size: int) -> Pin:
            return Pin(names=(b"\0" * size,), layout="", lease_s=1)

        assert await left.request("s", pin(368_640), Accepted, timeout_s=5)
        for call in (
            left.publish("s", pin(1_474_560)),
            left.request("s", pin(1_474_560), Accepted, timeout_s=5),
        ):
            with pytest.raises(MessageTooLarge) as caught:
                await call
            assert caught.value.limit == left.max_payload == 1_048_576
            assert caught.value.size > 1_474_560
        assert await left.request("s", pin(368_640), Accepted, timeout_s=5)
        assert left._client.client_id == client_id

    async def test_headers_count_against_the_limit(self, buses: tuple[Bus, Bus]) -> None:
        left, right = buses
        await right.subscribe("s", (Release,), accept)
        context = extract({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"})
        accepted = 0
        for size in range(1_048_576 - 160, 1_048_577, 8):
            try:
                await left.request("s", Release(lease_id="x" * size), Accepted, timeout_s=5, context=context)
                accepted += 1
            except MessageTooLarge:
                break
        assert accepted > 0  # and no DeadlineExceeded: the server took each one that was sent

    async def test_a_slow_consumer_is_counted_and_told(self, buses: tuple[Bus, Bus]) -> None:
        """Cases row 60."""
        left, right = buses
        gate, busy = asyncio.Event(), asyncio.Event()
        log, reports = Log(), list[int]()

        async def slow(message: Release, incoming: Incoming) -> None:
            busy.set()
            await gate.wait()
            await log(message, incoming)

        subscription = await right.subscribe("s", (Release,), slow, max_pending=10, on_dropped=reports.append)
        await left.publish("s", lease(0))
        await asyncio.wait_for(busy.wait(), PATIENCE_S)
        for number in range(1, 100):
            await left.publish("s", lease(number))
        await eventually(lambda: subscription.dropped == 89, "89 dropped: 10 wait and one is being handled")
        assert reports == [1]
        gate.set()
        await eventually(lambda: reports == [1, 89], "told when it caught up")
        assert log.ids[:6] == ["0", "1", "2", "3", "4", "5"]
        for number in range(100, 130):  # a handler that keeps up: no false alarm
            await left.publish("s", lease(number))
            await eventually(functools.partial(log.has, str(number)), "each later message")
        assert (subscription.dropped, right.stats.dropped, reports) == (89, 89, [1, 89])
        assert log.ids == [str(number) for number in [*range(11), *range(100, 130)]]


class TestBrokenConnections:
    async def test_no_server(self) -> None:
        with pytest.raises(BusError) as caught:
            await Bus.connect("nats://user:geheim@127.0.0.1:1", "t", timeout_s=0.5)
        assert "nats://***@127.0.0.1:1" in caught.value.message
        assert "baton up" in caught.value.message
        assert "geheim" not in caught.value.message

    async def test_a_server_that_says_nothing(self) -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        listener = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(BusError, match=f"127.0.0.1:{port}"):
            await asyncio.wait_for(Bus.connect(f"nats://127.0.0.1:{port}", "t", timeout_s=0.5), PATIENCE_S)
        listener.close()

    async def test_wrong_credentials(self, tmp_path: Path) -> None:
        url, process = start_nats(tmp_path, config='authorization { user: "a", password: "b" }')
        try:
            with pytest.raises(BusError, match="Authorization"):
                await Bus.connect(url, "t", timeout_s=1)
            async with await Bus.connect(url.replace("//", "//a:b@"), "t") as bus:
                assert bus.is_connected
        finally:
            stop_nats(process)

    async def test_a_refusal_outlives_the_reset_that_follows(self) -> None:
        """A server that refuses may hang up before its client has read why; a later attempt must not hide it."""
        attempts = itertools.count()

        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if next(attempts) == 0:
                writer.write(b'INFO {"auth_required": true, "max_payload": 1048576}\r\n')
                await reader.readline()
                writer.write(b"-ERR 'Authorization Violation'\r\n")
                await writer.drain()
                await reader.read()
            writer.transport.abort()

        listener = await asyncio.start_server(refuse, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(BusError, match="Authorization"):
            await asyncio.wait_for(Bus.connect(f"nats://127.0.0.1:{port}", "t", timeout_s=2), PATIENCE_S)
        assert next(attempts) > 1
        listener.close()

    async def test_a_denied_subject_is_logged(self, tmp_path: Path) -> None:
        """To the requester it looks like a responder that is silent; only the log tells."""
        user = '{ user: "a", password: "b", permissions: { publish: { deny: "secret" } } }'
        url, process = start_nats(tmp_path, config=f"authorization {{ users: [ {user} ] }}")
        try:
            async with await Bus.connect(url.replace("//", "//a:b@"), "t") as bus:
                with capture_logs() as lines, pytest.raises(DeadlineExceeded):
                    await bus.request("secret", lease(1), Accepted, timeout_s=0.3)
                assert [line["log_level"] for line in lines] == ["error"]
                assert "secret" in lines[0]["error"]
                assert bus.is_connected
        finally:
            stop_nats(process)

    async def test_a_restarted_server_is_found_again(self, server: Server, buses: tuple[Bus, Bus]) -> None:
        left, right = buses
        await right.subscribe("s", (Release,), accept)
        with capture_logs() as lines:
            server.stop()
            await eventually(lambda: not (left.is_connected or right.is_connected), "the loss is seen")
            await asyncio.sleep(0.5)  # several attempts fail meanwhile
            server.restart()
            await eventually(lambda: left.is_connected and right.is_connected, "connected again")
            assert await left.request("s", lease(1), Accepted, timeout_s=PATIENCE_S)
        events = [line["event"] for line in lines if line["log_level"] != "debug"]
        assert sorted(events) == ["connected to NATS again"] * 2 + ["lost the connection to NATS"] * 2

    async def test_what_was_published_meanwhile_is_delivered(
        self, server: Server, buses: tuple[Bus, Bus]
    ) -> None:
        left, _ = buses
        log = Log()
        await left.subscribe("s", (Release,), log)  # on the same connection: subscribed again before
        server.stop()
        await eventually(lambda: not left.is_connected, "the loss is seen")
        for number in range(100):
            await left.publish("s", lease(number))
        server.restart()
        await eventually(lambda: len(log.ids) == 100, "what waited")
        assert log.ids == [str(number) for number in range(100)]

    async def test_a_request_is_not_sent_after_its_requester_gave_up(
        self, server: Server, buses: tuple[Bus, Bus]
    ) -> None:
        left, right = buses
        log = Log()
        await right.subscribe("s", (Release,), log)
        server.stop()
        await eventually(lambda: not (left.is_connected or right.is_connected), "the loss is seen")
        with pytest.raises(DeadlineExceeded):
            await left.request("s", lease(1), Accepted, timeout_s=0.2)
        server.restart()
        await eventually(lambda: left.is_connected and right.is_connected, "connected again")
        await left.publish("s", lease(2))
        await eventually(lambda: "2" in log.ids, "a later message")
        assert log.ids == ["2"]

    async def test_a_request_waits_for_a_server_that_comes_back(
        self, server: Server, buses: tuple[Bus, Bus]
    ) -> None:
        left, right = buses
        await right.subscribe("s", (Release,), accept)
        server.stop()
        await eventually(lambda: not (left.is_connected or right.is_connected), "the loss is seen")
        asking = asyncio.ensure_future(left.request("s", lease(1), Accepted, timeout_s=PATIENCE_S))
        server.restart()
        try:
            assert await asking
        except NoResponder:  # the requester was back first
            await eventually(lambda: right.is_connected, "connected again")
            assert await left.request("s", lease(1), Accepted, timeout_s=PATIENCE_S)

    async def test_what_waits_for_a_server_is_bounded(self, server: Server, buses: tuple[Bus, Bus]) -> None:
        left, _ = buses
        server.stop()
        await eventually(lambda: not left.is_connected, "the loss is seen")
        message = Release(lease_id="x" * 1_000_000)
        with pytest.raises(BusError, match="no more can wait") as caught:
            for _ in range(PENDING_LIMIT_BYTES // 1_000_000 + 2):
                await left.publish("s", message)
        assert caught.value.retryable
        assert left._client.pending_data_size <= PENDING_LIMIT_BYTES

    async def test_a_new_connection_after_the_server_hung_up_for_an_error(
        self, server: Server, buses: tuple[Bus, Bus]
    ) -> None:
        """nats-py closes for good after an error line; subscriptions must live on all the same."""
        left, right = buses
        await right.subscribe("s", (Release,), accept)
        old = right._client
        await old._send_command(b"NONSENSE\r\n")
        await old._flush_pending()
        await eventually(lambda: old.is_closed, "the server hung up")
        await eventually(lambda: right.is_connected and right._client is not old, "a new connection")
        assert await left.request("s", lease(1), Accepted, timeout_s=5)

    async def test_a_server_that_stopped_reading_blocks_nobody_for_ever(
        self, server: Server, buses: tuple[Bus, Bus], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bus_module, "_FLUSH_TIMEOUT_S", 0.3)
        monkeypatch.setattr(bus_connection, "_CLOSE_TIMEOUT_S", 0.3)
        left, _ = buses
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(BusError):
                for _ in range(100):
                    await asyncio.wait_for(left.publish("s", Release(lease_id="x" * 1_000_000)), PATIENCE_S)
            await asyncio.wait_for(left.close(), PATIENCE_S)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)

    async def test_a_server_that_went_silent_is_given_up(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also with unsent data in the socket, for whose end nats-py would wait."""
        monkeypatch.setattr(bus_connection, "_PING_INTERVAL_S", 0.2)
        monkeypatch.setattr(bus_connection, "_UNACKNOWLEDGED_S", 0.5)
        bus = await Bus.connect(server.url, "t")
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            with capture_logs() as lines, contextlib.suppress(BusError):
                for _ in range(20):
                    await bus.publish("s", Release(lease_id="x" * 1_000_000))
            with capture_logs() as more:
                await eventually(
                    lambda: any("lost the connection" in line["event"] for line in lines + more), "given up"
                )
            assert not bus.is_connected
            await asyncio.wait_for(bus.close(), PATIENCE_S)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)


class TestEnding:
    async def test_drain_handles_what_came_and_sends_the_replies(self, buses: tuple[Bus, Bus]) -> None:
        left, right = buses

        async def slow(message: Release, incoming: Incoming) -> Message:
            await asyncio.sleep(0.02)
            return Accepted(worker_id=message.lease_id)

        subscription = await right.subscribe("s", (Release,), slow)
        asking = [
            asyncio.ensure_future(left.request("s", lease(number), Accepted, timeout_s=PATIENCE_S))
            for number in range(10)
        ]
        await eventually(lambda: subscription.pending >= 5, "they wait")
        await right.drain(timeout_s=PATIENCE_S)
        assert [reply.worker_id for reply in await asyncio.gather(*asking)] == [str(n) for n in range(10)]
        with pytest.raises(NoResponder):
            await left.request("s", lease(1), Accepted, timeout_s=5)

    async def test_drain_cuts_off_a_handler_that_hangs(self, buses: tuple[Bus, Bus]) -> None:
        left, right = buses
        cancelled = asyncio.Event()

        async def hangs(message: Release, incoming: Incoming) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        await right.subscribe("s", (Release,), hangs)
        await left.publish("s", lease(1))
        await left.publish("s", lease(2))
        await asyncio.sleep(0.1)
        await asyncio.wait_for(right.drain(timeout_s=0.2), PATIENCE_S)
        await asyncio.wait_for(cancelled.wait(), PATIENCE_S)
        assert not right.is_connected

    async def test_the_end_is_idempotent_and_later_calls_say_so(self, buses: tuple[Bus, Bus]) -> None:
        left, _ = buses
        await left.drain()
        await left.drain()
        await left.close()
        with pytest.raises(BusError, match="closed"):
            await left.publish("s", lease(1))
        with pytest.raises(BusError, match="closed"):
            await asyncio.wait_for(left.request("s", lease(1), Accepted, timeout_s=60), PATIENCE_S)
        with pytest.raises(BusError, match="closed"):
            await left.subscribe("s", (Release,), accept)

    async def test_drain_without_a_server_ends(self, server: Server, buses: tuple[Bus, Bus]) -> None:
        left, _ = buses
        await left.subscribe("s", (Release,), accept)
        server.stop()
        await eventually(lambda: not left.is_connected, "the loss is seen")
        await asyncio.wait_for(left.drain(), PATIENCE_S)
