"""What `baton bench engine` was asked for. Imports nothing that is slow: the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass

from libs.bench.shapes import GROUPS, Group


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """`groups` of shapes are measured `repeats` times each; `limits`: the machine's own too."""

    quick: bool = False
    repeats: int = 5
    groups: frozenset[Group] = frozenset(GROUPS)
    limits: bool = True
    as_json: bool = False
