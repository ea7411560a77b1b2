"""What a check of this machine found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`warn`: Baton runs, worse or for the moment. `missing`: it does not run. `advice` says what to do."""

    name: str
    level: Level
    fact: str
    advice: str = ""
