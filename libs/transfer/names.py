"""The transports by name, the fastest first. Imports nothing, so that settings can be checked anywhere."""

from __future__ import annotations

from typing import Final

NAMES: Final = ("shm", "nixl", "tcp")


def parse(text: str) -> tuple[str, ...]:
    """The names of a list such as "shm,tcp", in its order. Raises ValueError for an unknown one, or for none."""
    chosen = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in chosen if name not in NAMES]
    if unknown:
        raise ValueError(f"there is no transport {unknown[0]!r}, only {', '.join(NAMES)}")
    if not chosen:
        raise ValueError(f"must name at least one of {', '.join(NAMES)}")
    return chosen
