"""What Baton's engine must reach, as data: against llama.cpp, vLLM and the machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from libs.bench.shapes import FULL, Decode, Prefill

Against = Literal["q4_1", "best", "vllm", "machine"]
# "q4_1": llama.cpp on the shipped file. "best": the better of llama.cpp's two on that line. "machine": a limit of it.


@dataclass(frozen=True, slots=True)
class Target:
    """`key` of a figure, what it is held against, and the least factor: 2.0 is twice as fast, or half the time."""

    key: str
    against: Against
    factor: float


def _targets() -> Iterator[Target]:
    for prefill in FULL.prefills:
        yield Target(prefill.key, "q4_1", 4.0)
        yield Target(prefill.key, "best", 2.0)
    for decode in FULL.decodes:
        yield Target(decode.key, "q4_1", 1.5)
        yield Target(decode.key, "best", 1.2)
        yield Target(decode.key, "machine", 0.6)
    for streams in FULL.streams:
        yield Target(streams.key, "q4_1", 2.5)
        yield Target(streams.key, "best", 1.5)
    for cached in FULL.cached:
        yield Target(cached.key, "q4_1", 4.0)
        yield Target(cached.key, "best", 3.0)
    yield Target(Prefill(1024).key, "machine", 1.2)
    yield Target(Prefill(1024).key, "vllm", 1.7)
    yield Target(Prefill(4096).key, "vllm", 1.7)
    yield Target(Decode(16, 128).key, "vllm", 2.0)


TARGETS = tuple(_targets())
MOST_MEMORY_RATIO = 1.6  # resident memory of prefill and decode together / (weights + KV pools)


def target_for(key: str, against: Against) -> Target | None:
    return next((target for target in TARGETS if (target.key, target.against) == (key, against)), None)


def verdict(factor: float | None, target: Target | None) -> str:
    """A cell of the table: the factor, and whether it is what was wanted."""
    if factor is None:
        return "" if target is None else f"not measured (target {target.factor:g}x)"
    if target is None:
        return f"{factor:.2f}x"
    if factor >= target.factor:
        return f"{factor:.2f}x (target {target.factor:g}x)"
    return f"**{factor:.2f}x, missed** (target {target.factor:g}x)"
