"""What a run of `baton bench engine` found, as JSON or as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from libs.bench.figures import GEMM, READ, Figure, number
from libs.bench.machine import Machine
from libs.bench.memory import Resident
from libs.bench.shapes import LABELS
from libs.bench.work import Share

MIB = 1 << 20
LIMIT_LABELS = {GEMM: "float32 product, 2048^3", READ: "reading memory"}


@dataclass(frozen=True, slots=True)
class Memory:
    """Of this process after the measurements. `weight_bytes` as the model's files store them."""

    resident: Resident
    weight_bytes: int
    kv_pool_bytes: int

    @property
    def ratio(self) -> float:
        """Resident once the whole pool is in use, over weights and pool."""
        return (self.resident.beside_kv_bytes + self.kv_pool_bytes) / (self.weight_bytes + self.kv_pool_bytes)


@dataclass(frozen=True, slots=True)
class Report:
    """`shares` of the machine's limits, by the figure's key; empty without limits."""

    engine: str
    model: str
    threads: int
    max_step_tokens: int
    machine: Machine
    figures: tuple[Figure, ...]
    limits: tuple[Figure, ...]
    shares: dict[str, Share]
    memory: Memory

    def document(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "model": self.model,
            "threads": self.threads,
            "max_step_tokens": self.max_step_tokens,
            "machine": asdict(self.machine),
            "figures": [figure.to_json() for figure in self.figures],
            "limits": [limit.to_json() for limit in self.limits],
            "shares": {key: share.to_json() for key, share in self.shares.items()},
            "memory": {
                "pss_bytes": self.memory.resident.pss_bytes,
                "pss_beside_kv_bytes": self.memory.resident.beside_kv_bytes,
                "weight_bytes": self.memory.weight_bytes,
                "kv_pool_bytes": self.memory.kv_pool_bytes,
                "ratio": self.memory.ratio,
            },
        }

    def to_json(self) -> str:
        return json.dumps(self.document(), indent=2)

    def table(self) -> str:
        rows: list[tuple[str, ...]] = [("", "median", "min", "max", "unit", "of the machine")]
        rows += [self._row(LABELS.get(figure.key, figure.key), figure) for figure in self.figures]
        rows += [self._row(LIMIT_LABELS.get(limit.key, limit.key), limit) for limit in self.limits]
        memory = self.memory
        return "\n".join(
            (
                f"{self.model}, {self.threads} threads, steps of up to {self.max_step_tokens} tokens, {self.engine}",
                self.machine.line(),
                "",
                columns(rows),
                "",
                f"resident {memory.resident.pss_bytes / MIB:.0f} MiB, of it KV "
                f"{memory.resident.kv_bytes / MIB:.0f}; weights {memory.weight_bytes / MIB:.0f} MiB, KV pool "
                f"{memory.kv_pool_bytes / MIB:.0f}; resident with a full pool / (weights + pool) "
                f"{memory.ratio:.2f}",
            )
        )

    def _row(self, label: str, figure: Figure) -> tuple[str, ...]:
        share = self.shares.get(figure.key)
        of_machine = "" if share is None else f"{share.value:.2f}"
        values = (number(value) for value in (figure.median, figure.low, figure.high))
        return (label, *values, figure.unit, of_machine)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns: the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first = row[0].ljust(widths[0])
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join((first, *rest)).rstrip())
    return "\n".join(lines)
