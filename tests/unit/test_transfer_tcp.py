"""What only TCP has: strangers, keys, broken answers; and what a holder is like that does not answer at all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from libs.engine.kv.pool import KvPool
from libs.transfer import tcp, tcp_exporter, tcp_frames, tcp_server
from libs.transfer.interface import TransferError
from libs.transfer.tcp_frames import MAGIC, NONCE_BYTES, PROOF_BYTES
from tests.transfer_holder import LAYOUT, Holder, filled

KEY = b"k" * 32


@pytest.fixture
async def holder(tmp_path: Path) -> AsyncIterator[Holder]:
    holder = Holder("tcp", tmp_path, key=KEY)
    await holder.exporter.start()
    yield holder
    await holder.close()


@pytest.fixture
def own() -> Iterator[KvPool]:
    pool = KvPool(LAYOUT, 8)
    yield pool
    pool.close()


def dial(holder: Holder) -> socket.socket:
    host, port = holder.exporter.endpoint.removeprefix("tcp://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=10)


def everything(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):
        while more := sock.recv(65536):
            data += more
    return data


async def test_whoever_does_not_know_the_key_learns_nothing(holder: Holder, own: KvPool) -> None:
    for wrong in (b"x" * 32, b"", KEY[:-1]):
        with pytest.raises(TransferError, match="refuses the key"):
            await asyncio.to_thread(tcp.connect, holder.exporter.endpoint, wrong, own, 10)
    stranger = dial(holder)
    stranger.sendall(MAGIC + os.urandom(NONCE_BYTES) + bytes(PROOF_BYTES))
    said = await asyncio.to_thread(everything, stranger)
    stranger.close()
    assert len(said) == len(MAGIC) + NONCE_BYTES, "more than the challenge"


async def test_a_proof_is_good_for_one_connection(holder: Holder, own: KvPool) -> None:
    """What a listener overheard opens nothing: the holder's nonce is another each time."""
    first = dial(holder)
    challenge = first.recv(1024)
    nonce = os.urandom(NONCE_BYTES)
    answer = MAGIC + nonce + tcp_frames.prove(KEY, b"pull", challenge[len(MAGIC) :], nonce)
    first.sendall(answer)
    assert (await asyncio.to_thread(first.recv, 1024))[:1], "the proof is right"
    again = dial(holder)
    again.sendall(answer)
    assert len(await asyncio.to_thread(everything, again)) == len(MAGIC) + NONCE_BYTES
    first.close()
    again.close()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n" * 9, b"\0" * 200, os.urandom(300), b""])
async def test_garbage_costs_its_own_connection(holder: Holder, own: KvPool, garbage: bytes) -> None:
    stranger = dial(holder)
    stranger.sendall(garbage)
    stranger.shutdown(socket.SHUT_WR)
    await asyncio.to_thread(everything, stranger)
    stranger.close()
    link = await asyncio.to_thread(tcp.connect, holder.exporter.endpoint, KEY, own, 10)
    link.pull([(3, 3)], time.monotonic() + 10)
    assert bytes(own.blocks(3, 1)) == filled(3, LAYOUT)
    link.close()


async def test_a_request_of_too_much_ends_the_connection(holder: Holder, own: KvPool) -> None:
    link = await asyncio.to_thread(tcp.connect, holder.exporter.endpoint, KEY, own, 10)
    link._sock.sendall(tcp_frames.COUNT.pack(tcp_frames.MAX_RUNS + 1))
    with pytest.raises(TransferError):
        await asyncio.to_thread(link.pull, [(1, 1)], time.monotonic() + 10)
    assert not link.is_open


async def test_no_more_pullers_than_allowed(
    holder: Holder, own: KvPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "MAX_CONNECTIONS", 2)
    some = [await asyncio.to_thread(tcp.connect, holder.exporter.endpoint, KEY, own, 10) for _ in range(2)]
    with pytest.raises(TransferError):
        await asyncio.to_thread(tcp.connect, holder.exporter.endpoint, KEY, own, 10)
    some.pop().close()
    deadline = time.monotonic() + 10
    while len(some) < 2:  # the holder's thread has to notice
        assert time.monotonic() < deadline
        with contextlib.suppress(TransferError):
            some.append(await asyncio.to_thread(tcp.connect, holder.exporter.endpoint, KEY, own, 10))
    for link in some:
        link.close()


async def test_a_silent_stranger_is_cut_off(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "HANDSHAKE_S", 0.1)
    stranger = dial(holder)
    assert await asyncio.to_thread(everything, stranger)  # returns: it was closed
    stranger.close()


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64), "does not speak"),
        (MAGIC[:-1] + b"\x09" + bytes(64), "version 9"),
        (MAGIC + bytes(NONCE_BYTES) + bytes(PROOF_BYTES) + b"\0\0\0\x02{}", "its own key"),
        (MAGIC + bytes(NONCE_BYTES) + bytes(PROOF_BYTES) + b"\xff\xff\xff\xff", "description of"),
        (MAGIC[:3], "closed"),
    ],
)
def test_an_impostor_is_refused(own: KvPool, said: bytes, match: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def impostor() -> None:
        peer, _ = listener.accept()
        with contextlib.suppress(OSError):  # the other side may have left
            peer.sendall(said)
            peer.shutdown(socket.SHUT_WR)
            everything(peer)
        peer.close()

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(TransferError, match=match):
        tcp.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}", KEY, own, 5)
    thread.join()
    listener.close()


async def test_ipv6(tmp_path: Path, own: KvPool) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    pool = KvPool(LAYOUT, 8)
    try:
        exporter = tcp_exporter.TcpExporter(pool, Holder("tcp", tmp_path).exporter._info, KEY, "::1", 0)  # type: ignore[attr-defined]
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    await exporter.start()
    assert exporter.endpoint.startswith("tcp://[::1]:")
    link = await asyncio.to_thread(tcp.connect, exporter.endpoint, KEY, own, 10)
    link.pull([(1, 1)], time.monotonic() + 10)
    link.close()
    await exporter.close()
    pool.close()
