"""What a comparison found: figures of all engines, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.peers.targets import TARGETS, Against, Target, target_for, verdict
from libs.bench.figures import Figure, merge
from libs.bench.machine import Machine
from libs.bench.work import Share

BATON, Q4_1, Q4_0 = "Baton", "llama.cpp Q4_1", "llama.cpp Q4_0"
VLLM = "vLLM-CPU"  # measured elsewhere, brought in with --figures


@dataclass(slots=True)
class Comparison:
    """`figures` by engine, then by key. `shares` are Baton's figures as parts of the machine's limits.

    `notes` are what a reader has to know, `failures` say which engine did not finish which group.
    """

    command: str
    machine: Machine
    figures: dict[str, dict[str, Figure]] = field(default_factory=dict)
    limits: dict[str, Figure] = field(default_factory=dict)
    shares: dict[str, Share] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    quality: dict[str, Any] = field(default_factory=dict)
    loads: list[float] = field(default_factory=list)  # load average at the start of each round
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, engine: str, figures: list[Figure]) -> None:
        """More values of an engine's figures."""
        before = self.figures.get(engine, {})
        self.figures[engine] = merge([*before.values(), *figures])

    def lines(self) -> list[str]:
        """Every key that Baton or a peer has, in the order of measuring."""
        return list(dict.fromkeys(key for figures in self.figures.values() for key in figures))

    def factor(self, key: str, against: Against) -> float | None:
        """How many times better Baton is on this line; None where one of the two was not measured."""
        if against == "machine":
            share = self.shares.get(key)
            return None if share is None else share.value
        ours = self.figures.get(BATON, {}).get(key)
        theirs = self._other(key, against)
        return None if ours is None or theirs is None else ours.factor_over(theirs)

    def missed(self) -> list[Target]:
        """Targets that were measured and not reached."""
        factors = ((target, self.factor(target.key, target.against)) for target in TARGETS)
        return [target for target, factor in factors if factor is not None and factor < target.factor]

    def verdict(self, key: str, against: Against) -> str:
        return verdict(self.factor(key, against), target_for(key, against))

    def to_json(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "machine": asdict(self.machine),
            "figures": {
                engine: [figure.to_json() for figure in figures.values()]
                for engine, figures in self.figures.items()
            },
            "limits": [limit.to_json() for limit in self.limits.values()],
            "shares_of_machine": {key: share.to_json() for key, share in self.shares.items()},
            "memory": self.memory,
            "quality": self.quality,
            "targets": [self._target(target) for target in TARGETS],
            "load_average": self.loads,
            "notes": self.notes,
            "failures": self.failures,
        }

    def _target(self, target: Target) -> dict[str, Any]:
        factor = self.factor(target.key, target.against)
        met = None if factor is None else factor >= target.factor
        return {**_fields(target), "measured": factor, "met": met}

    def _other(self, key: str, against: Against) -> Figure | None:
        names: Mapping[Against, tuple[str, ...]] = {"q4_1": (Q4_1,), "best": (Q4_1, Q4_0), "vllm": (VLLM,)}
        found = [figures[key] for name in names[against] if key in (figures := self.figures.get(name, {}))]
        best: Figure | None = None
        for figure in found:
            if best is None or figure.factor_over(best) > 1:
                best = figure
        return best


def _fields(target: Target) -> dict[str, Any]:
    return {"key": target.key, "against": target.against, "factor": target.factor}
