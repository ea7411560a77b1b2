"""How fast blocks move between two processes of this host, beside what the machine can do at all.

python -m bench.transfer [--mib 92] [--rounds 9]

A pull copies as many blocks as a prompt of 4096 tokens of SmolLM2 has. Beside it, in turn: numpy's copy of as many
bytes within one process (memcpy, all cores), and a plain socket's `sendall` to `recv_into` of them over loopback. The
memory that is copied to is present in all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from libs.engine.kv.layout import KvLayout
from libs.engine.kv.pool import KvPool
from libs.transfer.interface import Place, PoolInfo
from libs.transfer.transports import TRANSPORTS
from libs.wire.messages import PoolRef

LAYOUT: Final = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16)  # SmolLM2-135M, f16
_TIMEOUT_S: Final = 30.0


def hold(transport: str, directory: str, num_blocks: int, pipe: Connection) -> None:
    """The holder's process: exports a pool, says where, and serves until told to end."""

    async def serve() -> None:
        pool = KvPool(LAYOUT, num_blocks)
        pool.view[:] = os.urandom(1 << 20) * (pool.num_bytes >> 20) + bytes(pool.num_bytes % (1 << 20))
        info = PoolInfo("holder", 1, LAYOUT.fingerprint, num_blocks, pool.num_bytes)
        key = os.urandom(32)
        exporter = TRANSPORTS[transport].export(pool, info, key, Place(Path(directory), "127.0.0.1", 0))
        await exporter.start()
        ref = PoolRef(
            worker_id="holder", endpoints=(exporter.endpoint,), epoch=1, layout=LAYOUT.fingerprint, key=key
        )
        pipe.send_bytes(msgspec.json.encode(ref))
        with contextlib.suppress(EOFError):
            await asyncio.to_thread(pipe.recv_bytes)
        await exporter.close()

    asyncio.run(serve())


def puller(transport: str, own: KvPool, directory: str, pipes: list[Connection]) -> Callable[[], None]:
    """`pipes` gets the one that keeps the holder alive."""
    ours, theirs = get_context("spawn").Pipe()
    pipes.append(ours)
    process = get_context("spawn").Process(
        target=hold, args=(transport, directory, own.num_blocks, theirs), daemon=True
    )
    process.start()
    theirs.close()
    ref = msgspec.json.decode(ours.recv_bytes(), type=PoolRef)
    link = TRANSPORTS[transport].connect(ref.endpoints[0], ref.key, own, _TIMEOUT_S)
    copies = [(n, n) for n in range(own.num_blocks)]
    return lambda: link.pull(copies, time.monotonic() + _TIMEOUT_S)


def memcpy(own: KvPool) -> Callable[[], None]:
    cores = len(os.sched_getaffinity(0))
    source, target = np.ones(own.num_bytes, np.uint8), np.frombuffer(own.view, np.uint8)
    size = -(-own.num_bytes // cores)
    threads = ThreadPoolExecutor(cores)

    def copy() -> None:
        starts = range(0, own.num_bytes, size)
        list(threads.map(lambda at: np.copyto(target[at : at + size], source[at : at + size]), starts))

    return copy


def loopback(own: KvPool) -> Callable[[], None]:
    """The sender is a thread: neither side holds the GIL while bytes move."""
    listener = socket.create_server(("127.0.0.1", 0))
    receiver = socket.create_connection(listener.getsockname())
    sender, _ = listener.accept()
    source = b"\1" * own.num_bytes

    def move() -> None:
        thread = threading.Thread(target=sender.sendall, args=(source,))
        thread.start()
        target = own.view
        while target:
            target = target[receiver.recv_into(target) :]
        thread.join()

    return move


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=92, help="of one pull")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    own = KvPool(LAYOUT, max(1, (arguments.mib << 20) // LAYOUT.block_bytes))
    own.populate(0, own.num_bytes)
    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        ways = {"memcpy": memcpy(own), "loopback": loopback(own)}
        pipes: list[Connection] = []
        ways |= {name: puller(name, own, directory, pipes) for name in TRANSPORTS}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(arguments.rounds + 1):
            for name, move in ways.items():
                began = time.perf_counter()
                move()
                if number:  # the first of each warms up
                    rates[name].append(own.num_bytes / (time.perf_counter() - began) / 1e9)
        for name, found in rates.items():
            limit = "memcpy" if name in ("memcpy", "shm") else "loopback"
            ratio = statistics.median(a / b for a, b in zip(found, rates[limit], strict=True))
            spread = f"({min(found):.2f} to {max(found):.2f})"
            print(f"{name:10} {statistics.median(found):6.2f} GB/s {spread:18} {ratio:.2f} of {limit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
