"""Memory of the pool, made present before it is needed.

The first write to each 4 KiB of a pool costs microseconds: the system finds a page and clears it. A prompt that comes
from a peer or the store would spend more time on that than on its bytes. So a thread keeps a stretch of untouched
blocks ready ahead of those in use; the pool as a whole still grows only as it fills.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from libs.engine.kv.pool import KvPool
from libs.service.logs import get_logger

AHEAD_BYTES: Final = 128 << 20
_STEP_BYTES: Final = 1 << 20  # under a millisecond, during which no other Python code runs
_REST_S: Final = 0.0005
log = get_logger()


class Prefault:
    """Owned by the event loop's thread. `num_bytes` of the pool, from its start, are or are being made present."""

    def __init__(self, pool: KvPool, ahead_bytes: int = AHEAD_BYTES) -> None:
        self.num_bytes = 0
        self._pool = pool
        self._ahead_bytes = ahead_bytes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-prefault")
        self._work: Future[None] | None = None
        self._is_possible = True
        self._closed = False

    def reach(self, num_blocks: int) -> None:
        """`num_blocks` of the pool have been in use at once: KvCache hands out its first blocks first."""
        size = self._pool.layout.block_bytes
        end = min(self._pool.num_bytes, num_blocks * size + self._ahead_bytes)
        is_busy = self._work is not None and not self._work.done()
        if end > self.num_bytes and not is_busy and self._is_possible:
            self._work = self._thread.submit(self._populate, self.num_bytes, end)
            self.num_bytes = end

    def close(self) -> None:
        """Returns when the pool is not touched any more."""
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _populate(self, start: int, end: int) -> None:
        try:
            for at in range(start, end, _STEP_BYTES):
                if self._closed:
                    return
                self._pool.populate(at, min(_STEP_BYTES, end - at))
                time.sleep(_REST_S)
        except OSError as error:  # an older kernel, or no memory left: pages come when they are written to
            self._is_possible = False
            log.info("the pool is not made present ahead", error=str(error))
