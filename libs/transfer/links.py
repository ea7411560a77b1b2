"""The links of one worker: opened when first needed, kept per life of a peer, closed with the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from urllib.parse import urlsplit

from libs.engine.kv.pool import KvPool
from libs.transfer import shm
from libs.transfer.interface import Copy, Link, TransferError
from libs.wire.messages import PoolRef

T = TypeVar("T")
Connect = Callable[[str, KvPool, float], Link]
CONNECT: dict[str, Connect] = {shm.SCHEME: shm.connect}


class Links:
    """Pulls blocks of any peer into `own`. Calls come from the event loop; copies run on its own thread."""

    def __init__(self, own: KvPool) -> None:
        self._own = own
        self._links: dict[str, Link] = {}  # by worker id, of its newest epoch
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-pull")

    async def pull(self, ref: PoolRef, copies: Sequence[Copy], timeout_s: float) -> None:
        """Copies blocks from the pool `ref` names; raises TransferError.

        Returns, raises or lets a cancellation through only when no thread writes to the target blocks any
        more, so the caller may free them at once.
        """
        if ref.layout != self._own.layout.fingerprint:
            raise TransferError(
                f"{ref.worker_id} has KV layout {ref.layout}, not {self._own.layout.fingerprint}"
            )
        await self._run(lambda: self._link(ref, timeout_s).pull(copies))

    async def close(self) -> None:
        await self._run(self._close_links)
        self._thread.shutdown(wait=False)

    def _link(self, ref: PoolRef, timeout_s: float) -> Link:
        link = self._links.get(ref.worker_id)
        if link is not None and link.info.epoch != ref.epoch:
            del self._links[ref.worker_id]
            link.close()
            link = None
        if link is None:
            scheme = urlsplit(ref.endpoint).scheme
            if scheme not in CONNECT:
                raise TransferError(
                    f"{ref.worker_id} exports by {scheme!r}, which this worker does not speak"
                )
            link = CONNECT[scheme](ref.endpoint, self._own, timeout_s)
            if link.info.epoch != ref.epoch:
                link.close()
                raise TransferError(f"{ref.worker_id} has restarted: its blocks are gone")
            self._links[ref.worker_id] = link
        return link

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()

    async def _run(self, work: Callable[[], T]) -> T:
        """Runs on the transfer thread; a cancelled caller still waits for the thread to be done."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            future.exception()  # the caller left: nobody else will read it
            raise
