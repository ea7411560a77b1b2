"""A worker's side of the durable store: what writes behind, what loads, and how both stand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from libs.service.config import Settings
from libs.store.interface import Store
from libs.store.open import open_store
from libs.worker.store_access import StoreAccess
from libs.worker.store_loader import StoreLoader
from libs.worker.write_behind import WriteBehind

Detail = dict[str, str | int | float]


class Durable:
    """Everything of one worker that touches the store. Owned by the event loop's thread. `compute_rate`: tokens/s."""

    def __init__(
        self,
        access: StoreAccess,
        compute_rate: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.writer = WriteBehind(access, clock)
        self.loader = StoreLoader(
            access,
            compute_rate=compute_rate,
            on_loaded=self.writer.loaded,
            clock=clock,
        )
        self._store = access.store

    def detail(self) -> Detail:
        """For `baton status`. Blocks, but for the texts."""
        counts = self.writer.counts
        return {
            "store": self.writer.problem or "ok",
            "store_waiting": self.writer.num_waiting,
            "store_written": counts.written,
            "store_lost": counts.lost,
            "store_dropped": counts.dropped,
            "store_loaded": self.loader.num_loaded,
            **{f"store_load_{reason}": count for reason, count in self.loader.failures.items()},
        }

    async def close(self, timeout_s: float) -> None:
        """Gives what waits `timeout_s` to be written; `writer.run` must still run."""
        await self.writer.flush(timeout_s)
        self.writer.close()
        self.loader.close()
        await asyncio.to_thread(self._store.close)


def open_durable_store(settings: Settings) -> Store | None:
    """The store that the settings name. Raises ConfigError-like ValueError for a URL that is none."""
    return None if settings.store_url is None else open_store(settings.store_url)
