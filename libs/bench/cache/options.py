"""What `baton bench cache` was asked for. Imports nothing that is slow: the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Every policy is replayed with every capacity. Sizes of store and pools are in tokens.

    `move`: probability that a request may not go where its session was served last. `outputs`: what a request's answer
    adds to the next prompt counts as published by the decode worker.
    """

    trace: Path
    capacities: tuple[int, ...]
    policies: tuple[str, ...] = ("lru",)
    nodes: int = 8
    sessions: int = 64
    move: float = 0.0
    pool_tokens: int = 1_000_000
    seed: int = 0
    outputs: bool = False
    as_json: bool = False
