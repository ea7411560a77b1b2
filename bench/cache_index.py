"""How long the coordinator's index takes to look up a prompt, and what a name costs.

python -m bench.cache_index
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from services.cache.index import BlockIndex


@dataclass(frozen=True, slots=True)
class LookupFigures:
    """Milliseconds per lookup of the whole prompt, and resident bytes per name in the index."""

    best_ms: float
    median_ms: float
    bytes_per_name: float


def measure(
    *, num_names: int = 1_000_000, prompt_names: int = 8192, num_workers: int = 8, repeats: int = 21
) -> LookupFigures:
    """Looks up a prompt that every worker holds to a different depth, among `num_names` others.

    The names looked up are fresh objects each time, as they are when they come off the wire.
    """
    index, before = BlockIndex(), _resident_bytes()
    prompt = [os.urandom(32) for _ in range(prompt_names)]
    for number in range(num_workers):
        holder = index.open()
        index.add(holder, (os.urandom(32) for _ in range(num_names // num_workers)))
        index.add(holder, prompt[: prompt_names * (number + 1) // num_workers])
        index.publish(holder, f"worker-{number}")
    bytes_per_name = (_resident_bytes() - before) / len(index)
    times_ms = []
    for _ in range(repeats):
        asked = [bytes(bytearray(name)) for name in prompt]
        start_s = time.perf_counter()
        runs = index.runs(asked)
        times_ms.append(1e3 * (time.perf_counter() - start_s))
        assert max(runs.values()) == prompt_names
    return LookupFigures(min(times_ms), statistics.median(times_ms), bytes_per_name)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(measure())
