"""Names of a trace's blocks: chained as the engine chains them, with the trace's integer in place of tokens."""

from __future__ import annotations

import hashlib

from libs.bench.cache.trace import Runs
from libs.engine.kv.names import child_name


class BlockNames:
    """Names of one trace, each made once: equal blocks behind equal blocks of a scope have one name."""

    def __init__(self) -> None:
        self._roots: dict[str, bytes] = {}
        self._runs: dict[tuple[bytes, int], list[bytes]] = {}  # parent, first block: the names from there on

    def root(self, scope: str) -> bytes:
        """The parent of first blocks, 32 bytes."""
        return self._roots.setdefault(scope, hashlib.sha256(scope.encode()).digest())

    def of(self, scope: str, blocks: Runs) -> list[bytes]:
        """32 bytes for each block."""
        parent, names = self.root(scope), list[bytes]()
        for first, length in blocks:
            run = self._runs.setdefault((parent, first), [])
            for block in range(first + len(run), first + length):
                run.append(child_name(run[-1] if run else parent, (block,)))
            names += run if len(run) == length else run[:length]
            parent = names[-1]
        return names
