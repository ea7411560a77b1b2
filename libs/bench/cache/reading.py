"""Which kind of trace a file is."""

from __future__ import annotations

from pathlib import Path

from libs.bench.cache import coding, mooncake
from libs.bench.cache.trace import Trace


def read_trace(path: Path) -> Trace:
    """A gzip file holds coding-agent sessions, anything else is taken for Mooncake's format. Raises TraceError."""
    return coding.read(path) if path.suffix == ".gz" else mooncake.read(path)
