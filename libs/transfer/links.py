"""The links of one worker: opened when first needed, one for each life of a peer, closed when idle or at the end.

For each peer the first transport of the worker's list that works is taken. One that is passed over is told of: in the
log, in `baton status`. Each peer has a thread of its own, so one that is stuck holds up nobody else.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from libs.engine.kv.pool import KvPool
from libs.service.logs import get_logger
from libs.transfer.interface import Copy, Link, TransferError, Transport
from libs.wire.messages import PoolRef

IDLE_S: Final = 60.0  # a mapped pool of a dead worker is memory that nobody else gets
RETRY_S: Final = 30.0  # a faster transport that failed is tried again after so long
log = get_logger()


@dataclass(slots=True)
class _Peer:
    """One life of a peer. `passed_over`: faster transports and why they are not used."""

    epoch: int
    thread: ThreadPoolExecutor
    link: Link | None = None
    transport: str = ""
    passed_over: dict[str, str] = field(default_factory=dict)
    retry_at_s: float = float("inf")
    used_at_s: float = 0.0
    num_pulls: int = 0  # that run or wait
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards `running`
    running: _Pull | None = None


@dataclass(slots=True, eq=False)
class _Pull:
    """One pull. `unwanted`: its caller was cancelled."""

    ref: PoolRef
    copies: Sequence[Copy]
    deadline_s: float
    unwanted: bool = False


class Links:
    """Pulls blocks of any peer into `own`. Owned by the event loop; copies run on the peers' threads."""

    def __init__(self, own: KvPool, transports: Sequence[Transport]) -> None:
        self._own = own
        self._transports = transports
        self._peers: dict[str, _Peer] = {}  # by worker id, of its newest epoch
        self.num_fallbacks = 0

    async def pull(self, ref: PoolRef, copies: Sequence[Copy], timeout_s: float) -> None:
        """Copies blocks from the pool `ref` names; raises TransferError.

        Returns, raises or lets a cancellation through only when no thread writes to the target blocks any
        more, so the caller may free them at once.
        """
        if ref.layout != self._own.layout.fingerprint:
            raise TransferError(
                f"{ref.worker_id} has KV layout {ref.layout}, not {self._own.layout.fingerprint}"
            )
        pull = _Pull(ref, copies, time.monotonic() + timeout_s)
        peer = await self._peer(ref)
        peer.num_pulls += 1
        try:
            await self._run(peer, pull)
        finally:
            peer.num_pulls -= 1
            peer.used_at_s = time.monotonic()

    def describe(self) -> str:
        """For people: which transport serves which peer, and why not a faster one."""
        parts = []
        for worker_id, peer in sorted(self._peers.items()):
            why = "; ".join(f"{name}: {reason}" for name, reason in peer.passed_over.items())
            parts.append(f"{worker_id} {peer.transport or 'none'}" + (f" ({why})" if why else ""))
        return ", ".join(parts)

    async def close_idle(self, now_s: float) -> None:
        """Gives back links that nobody has used for `IDLE_S`; called from a timer."""
        for worker_id, peer in list(self._peers.items()):
            if not peer.num_pulls and now_s - peer.used_at_s > IDLE_S:
                del self._peers[worker_id]
                await self._end(peer)

    async def close(self) -> None:
        peers = list(self._peers.values())
        self._peers.clear()
        for peer in peers:
            if peer.link is not None:
                peer.link.abort()
        await asyncio.gather(*map(self._end, peers))

    async def _peer(self, ref: PoolRef) -> _Peer:
        """Raises TransferError for blocks of an earlier life of the peer."""
        peer = self._peers.get(ref.worker_id)
        if peer is not None and peer.epoch > ref.epoch:
            raise TransferError(f"{ref.worker_id} has restarted: its blocks are gone")
        if peer is None or peer.epoch < ref.epoch:
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"kv-pull-{ref.worker_id}")
            self._peers[ref.worker_id] = _Peer(ref.epoch, thread, used_at_s=time.monotonic())
            if peer is not None:
                if peer.link is not None:
                    peer.link.abort()
                await self._end(peer)
        return self._peers[ref.worker_id]

    async def _end(self, peer: _Peer) -> None:
        def close() -> None:
            if peer.link is not None:
                peer.link.close()

        await asyncio.get_running_loop().run_in_executor(peer.thread, close)
        peer.thread.shutdown(wait=False)

    async def _run(self, peer: _Peer, pull: _Pull) -> None:
        """Runs on the peer's thread; a cancelled caller still waits for the thread to be done with its blocks."""
        future = asyncio.get_running_loop().run_in_executor(peer.thread, self._work, peer, pull)
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            pull.unwanted = True
            with peer.lock:
                if peer.running is pull and peer.link is not None:
                    peer.link.abort()
            await asyncio.wait([future])
            future.exception()  # the caller left: nobody else will read it
            raise

    # ------------------------------------------------------------ on the peer's thread

    def _work(self, peer: _Peer, pull: _Pull) -> None:
        with peer.lock:
            peer.running = pull
        try:
            if pull.unwanted or time.monotonic() >= pull.deadline_s:
                raise TransferError(f"a pull from {pull.ref.worker_id} waited too long for those before it")
            self._link(peer, pull).pull(pull.copies, pull.deadline_s)
        finally:
            with peer.lock:
                peer.running = None

    def _link(self, peer: _Peer, pull: _Pull) -> Link:
        link = peer.link
        if link is not None and link.is_open and time.monotonic() < peer.retry_at_s:
            return link
        peer.link = None
        if link is not None:
            link.close()
        link = self._connect(peer, pull.ref, pull.deadline_s)
        peer.link = link
        return link

    def _connect(self, peer: _Peer, ref: PoolRef, deadline_s: float) -> Link:
        endpoints = {urlsplit(endpoint).scheme: endpoint for endpoint in ref.endpoints}
        peer.passed_over, peer.transport, peer.retry_at_s = {}, "", float("inf")
        for transport in self._transports:
            endpoint = endpoints.get(transport.name)
            reason = "not exported" if endpoint is None else transport.unreachable(endpoint)
            if endpoint is not None and not reason:
                try:
                    link = self._open(transport, endpoint, ref, deadline_s)
                except TransferError as error:
                    reason = error.message
                    peer.retry_at_s = time.monotonic() + RETRY_S
                else:
                    peer.transport = transport.name
                    return link
            peer.passed_over[transport.name] = reason
            self.num_fallbacks += 1
            log.warning("transport passed over", peer=ref.worker_id, transport=transport.name, why=reason)
        why = "; ".join(f"{name}: {reason}" for name, reason in peer.passed_over.items())
        raise TransferError(f"no way to the pool of {ref.worker_id} ({why})")

    def _open(self, transport: Transport, endpoint: str, ref: PoolRef, deadline_s: float) -> Link:
        left_s = max(0.001, deadline_s - time.monotonic())
        link = transport.connect(endpoint, ref.key, self._own, left_s)
        if (link.info.worker_id, link.info.epoch) != (ref.worker_id, ref.epoch):
            found = f"{link.info.worker_id} of epoch {link.info.epoch}"
            link.close()
            raise TransferError(f"{endpoint} is now {found}: the blocks that were meant are gone")
        return link
