"""What a replay found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from libs.bench.cache.options import ReplayOptions
from libs.bench.cache.trace import Trace
from libs.bench.report import columns


@dataclass(frozen=True, slots=True)
class Result:
    """One replay. All sizes in tokens; `uncached` is what each node had to compute."""

    policy: str
    capacity: int
    own: int
    peer: int
    store: int
    optimum: int
    total: int
    uncached: Mapping[str, int]
    moved_requests: int
    evicted: int
    evicted_objects: int
    seconds: float

    @property
    def hit_rate(self) -> float:
        """Of input tokens, 0 to 1."""
        return (self.own + self.peer + self.store) / self.total

    @property
    def optimum_rate(self) -> float:
        return self.optimum / self.total

    @property
    def imbalance(self) -> float:
        """Uncached tokens: of the node with most, over the mean."""
        total = sum(self.uncached.values())
        return max(self.uncached.values()) * len(self.uncached) / total if total else 1.0

    def document(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "hit_rate": self.hit_rate,
            "optimum_rate": self.optimum_rate,
            "imbalance": self.imbalance,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """All replays of one trace."""

    trace: Trace
    options: ReplayOptions
    results: Sequence[Result]

    def to_json(self) -> str:
        options = {
            key: value
            for key, value in asdict(self.options).items()
            if key not in ("trace", "as_json", "capacities", "policies")
        }
        document = {
            "trace": self.trace.name,
            "sessions": len(self.trace.sessions),
            "requests": self.trace.num_requests,
            "input_tokens": self.trace.num_tokens,
            "options": options,
            "replays": [result.document() for result in self.results],
        }
        return json.dumps(document, indent=2)

    def table(self) -> str:
        trace, options = self.trace, self.options
        mean = trace.num_tokens / trace.num_requests
        rows: list[tuple[str, ...]] = [
            ("policy", "store", "hits", "optimum", "own", "peer", "from store", "load", "evicted", "time")
        ]
        rows += [_row(result) for result in self.results]
        return "\n".join(
            (
                f"{trace.name}: {trace.num_requests} requests, mean input {mean:.0f} tokens; {options.nodes} nodes "
                f"with pools of {tokens(options.pool_tokens)}, {self._arrival()}, seed {options.seed}",
                "",
                columns(rows),
                "",
                "hits, own pool, peer, store: % of input tokens; load: uncached tokens of the busiest node / mean",
            )
        )

    def _arrival(self) -> str:
        if self.trace.has_own_times:
            return "by the trace's own times"
        return f"{self.options.sessions} sessions at once, {self.options.move:.0%} of requests moved"


def tokens(number: int) -> str:
    """16M, 250K, 1234."""
    for unit, letter in ((1_000_000, "M"), (1_000, "K")):
        if number >= unit and number % unit == 0:
            return f"{number // unit}{letter}"
    return str(number)


def _row(result: Result) -> tuple[str, ...]:
    rates = (result.hit_rate, result.optimum_rate)
    tiers = (part / result.total for part in (result.own, result.peer, result.store))
    return (
        result.policy,
        tokens(result.capacity),
        *(f"{100 * rate:.2f}" for rate in rates),
        *(f"{100 * share:.1f}" for share in tiers),
        f"{result.imbalance:.2f}",
        f"{result.evicted / 1e6:.1f}M",
        f"{result.seconds:.0f} s",
    )
