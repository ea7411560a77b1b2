"""Blocks through shared memory, between processes of one host.

The holder's pool is an anonymous memory file. A peer connects to the holder's Unix socket once, is sent the
file's descriptor (SCM_RIGHTS) with a line that describes the pool, maps it read-only, and from then on pulls
with plain copies: no byte and no message passes through the holder's process.

    holder                                   puller
      listen  <state>/run/decode-1.sock  <---- connect          shm://<boot id>/<path of the socket>
      {"worker_id": ..., "epoch": ...} + fd --> mmap(fd, PROT_READ)
                                              copy, copy, copy ...
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np

from libs.engine.kv.pool import KvPool
from libs.transfer.interface import Copy, Place, PoolInfo, TransferError, Transport
from libs.transfer.runs import Run, runs, split

SCHEME = "shm"
_HELLO_BYTES = 4096
_COPY_THREADS = min(4, len(os.sched_getaffinity(0)))
_PIECE_BYTES = 4 << 20  # a copy in flight is not interrupted: about half a millisecond
_MAX_PATH_BYTES = 107  # sun_path of sockaddr_un, less its end


class ShmExporter:
    """Hands the descriptor of `pool` to every peer that connects to `path`, which only this user can."""

    def __init__(self, pool: KvPool, info: PoolInfo, path: Path) -> None:
        if len(os.fsencode(path)) > _MAX_PATH_BYTES:
            raise ValueError(
                f"socket path {path} is longer than {_MAX_PATH_BYTES} bytes; use a shorter state dir"
            )
        self._pool = pool
        self._hello = msgspec.json.encode(asdict(info))
        self._path = path
        self._listener: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> str:
        return f"{SCHEME}://{_boot_id()}{self._path}"

    async def start(self) -> None:
        """Listens; a socket file left by an earlier process of this id is replaced."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(self._path))
        self._path.chmod(0o600)
        listener.listen(64)
        listener.setblocking(False)
        self._listener = listener
        self._task = asyncio.create_task(self._accept(listener), name="shm-exporter")

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            peer, _ = await loop.sock_accept(listener)
            # One small packet into an empty buffer: never blocks; a peer that has gone is its own problem.
            with peer, contextlib.suppress(OSError):
                socket.send_fds(peer, [self._hello], [self._pool.fd])

    async def close(self) -> None:
        """Stops handing out the pool; peers that have it mapped keep their mapping. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)


class ShmLink:
    """A peer's pool, mapped read-only into this process."""

    def __init__(self, own: KvPool, info: PoolInfo, fd: int) -> None:
        self.info = info
        self._own = own
        self._map = mmap.mmap(fd, info.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self._theirs = np.frombuffer(self._map, dtype=np.uint8)
        self._threads = ThreadPoolExecutor(max_workers=_COPY_THREADS, thread_name_prefix="kv-copy")
        self._aborted = threading.Event()

    @property
    def is_open(self) -> bool:
        return not self._map.closed

    def pull(self, copies: Sequence[Copy], deadline_s: float) -> None:
        """See `Link.pull`; also raises TransferError for a block that the peer lacks. Does not hold the GIL.

        Several cores copy together: one alone does not reach what the memory can do.
        """
        if not self.is_open:
            raise TransferError("the link is closed")
        self._aborted.clear()
        most = max(1, _PIECE_BYTES // self._own.layout.block_bytes)
        pieces = [piece for run in runs(copies) for piece in split(run, most)]
        if len(pieces) < 2:
            for piece in pieces:
                self._copy(piece, deadline_s)
            return
        works = [self._threads.submit(self._copy, piece, deadline_s) for piece in pieces]
        wait(works)  # all of them: nobody writes to these blocks when this returns or raises
        for work in works:
            work.result()

    def _copy(self, run: Run, deadline_s: float) -> None:
        theirs, ours, count = run
        if theirs < 0 or theirs + count > self.info.num_blocks:
            raise TransferError(f"{self.info.worker_id} has no block {theirs + count - 1}")
        if self._aborted.is_set():
            raise TransferError("aborted")
        if time.monotonic() >= deadline_s:
            raise TransferError(f"copying from {self.info.worker_id} took too long")
        size = self._own.layout.block_bytes
        target = np.frombuffer(self._own.blocks(ours, count), dtype=np.uint8)
        np.copyto(target, self._theirs[theirs * size : (theirs + count) * size])

    def abort(self) -> None:
        """Ends the pull that runs, if one does; the link remains of use."""
        self._aborted.set()

    def close(self) -> None:
        if self.is_open:
            self._threads.shutdown()
            del self._theirs
            self._map.close()


def export(pool: KvPool, info: PoolInfo, key: bytes, place: Place) -> ShmExporter:
    """`key` is not needed: only this user can connect."""
    return ShmExporter(pool, info, place.run_dir / f"{info.worker_id}.sock")


def unreachable(endpoint: str) -> str:
    """Memory is shared within one running kernel, and the socket must be in a file system that both see."""
    url = urlsplit(endpoint)
    if url.netloc != _boot_id():
        return "on another host"
    return "" if Path(url.path).exists() else "its socket is not in this file system"


def connect(endpoint: str, key: bytes, own: KvPool, timeout_s: float) -> ShmLink:
    """Maps the pool exported at `endpoint`. Blocks up to `timeout_s`. Raises TransferError."""
    path = urlsplit(endpoint).path
    fds: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(timeout_s)
            peer.connect(path)
            hello, fds, _, _ = socket.recv_fds(peer, _HELLO_BYTES, 1)
        info = msgspec.json.decode(hello, type=PoolInfo)
        if len(fds) != 1:
            raise TransferError(f"{endpoint} sent no descriptor")
        info.check(own)
        if os.fstat(fds[0]).st_size < info.num_bytes:
            raise TransferError(f"{info.worker_id} describes a pool of another size than it sent")
        return ShmLink(own, info, fds[0])
    except (OSError, msgspec.DecodeError) as error:
        raise TransferError(f"cannot map the pool at {endpoint}: {error}") from error
    finally:
        for fd in fds:
            os.close(fd)


@cache
def _boot_id() -> str:
    """Names this start of this kernel: https://docs.kernel.org/admin-guide/sysctl/kernel.html#random"""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


TRANSPORT = Transport(SCHEME, export, connect, unreachable)
