"""A measured quantity: several values of it, of which the median and the extremes are shown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

TOKENS_PER_S = "tok/s"
MILLISECONDS = "ms"
GEMM, READ = "gemm-f32", "read-bandwidth"  # keys of the machine's limits
_LESS_IS_BETTER = frozenset({MILLISECONDS})


@dataclass(frozen=True, slots=True)
class Figure:
    """`values` of one quantity, in the order in which they were measured; at least one."""

    key: str
    unit: str
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"no value of {self.key} was measured")

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def factor_over(self, other: Figure) -> float:
        """How many times better this median is than the other's: above 1 is better, whatever the unit.

        Raises ValueError where the units differ.
        """
        if self.unit != other.unit:
            raise ValueError(f"{self.key} in {self.unit} and {other.key} in {other.unit} cannot be compared")
        if self.unit in _LESS_IS_BETTER:
            return other.median / self.median
        return self.median / other.median

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "unit": self.unit,
            "median": self.median,
            "min": self.low,
            "max": self.high,
            "values": list(self.values),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Figure:
        return cls(str(document["key"]), str(document["unit"]), tuple(map(float, document["values"])))


def merge(figures: Iterable[Figure]) -> dict[str, Figure]:
    """One figure per key with all its values, in the order of first appearance."""
    merged: dict[str, Figure] = {}
    for figure in figures:
        before = merged.get(figure.key)
        values = figure.values if before is None else before.values + figure.values
        merged[figure.key] = Figure(figure.key, figure.unit, values)
    return merged


def number(value: float) -> str:
    """Three digits that matter, never in exponents: 1234, 98.7, 0.0123."""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 4
    return f"{value:.{digits}f}"


def spread(figure: Figure) -> str:
    """`median (min..max)`"""
    return f"{number(figure.median)} ({number(figure.low)}..{number(figure.high)})"
