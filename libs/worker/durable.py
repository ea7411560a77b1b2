"""A worker's side of the durable store: what writes behind, what loads, and how both stand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from libs.engine.step import StepEvent
from libs.service.config import Settings
from libs.store.interface import Store
from libs.store.open import open_store
from libs.worker.store_access import StoreAccess
from libs.worker.store_loader import StoreLoader
from libs.worker.write_behind import WriteBehind

_RATE_WEIGHT: Final = 0.2  # of the newest step in the running mean
_MIN_CHUNK: Final = 16  # tokens; smaller steps say nothing about reading prompts
Detail = dict[str, str | int | float]


class ComputeRate:
    """Prompt tokens per second that this worker computes, as a running mean over its steps; 0 before the first."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0

    def step(self, events: list[StepEvent]) -> None:
        tokens = sum(event.num_computed for event in events)
        if tokens < _MIN_CHUNK or not events:
            return
        seconds = (events[0].ended_ns - events[0].started_ns) / 1e9
        if seconds > 0:
            rate = tokens / seconds
            weight = _RATE_WEIGHT if self.tokens_per_s else 1.0
            self.tokens_per_s += weight * (rate - self.tokens_per_s)


class Durable:
    """Everything of one worker that touches the store. Owned by the event loop's thread."""

    def __init__(
        self,
        access: StoreAccess,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rate = ComputeRate()
        self.writer = WriteBehind(access, clock)
        self.loader = StoreLoader(
            access,
            compute_rate=lambda: self.rate.tokens_per_s,
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
