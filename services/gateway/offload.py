"""Work that would hold up the event loop goes to a few threads; small work is done at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")
INLINE_WEIGHT: Final = 4096  # characters or tokens that take well under a millisecond or two


class Offload:
    """A thread pool of `num_threads`. Waiting work is bounded by the requests a gateway admits."""

    def __init__(self, num_threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="gateway")

    async def run(self, work: Callable[[], T], *, weight: int) -> T:
        """The result of `work`; `weight` is the number of characters or tokens it has to look at."""
        if weight <= INLINE_WEIGHT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Waits for nothing: what still waits is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
