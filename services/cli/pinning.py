"""Which cores are whose with `baton up --pin`: each decode worker has some that nobody else runs on.

A long prompt uses all that its worker can get, and a stream feels each millisecond that it takes from a decode
worker. Prefill workers share what is left with the gateway, the coordinator and NATS, which need little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libs.service.config import ConfigError


@dataclass(frozen=True, slots=True)
class Pinning:
    """`decode`: cores of each decode worker; `rest`: of everything else."""

    decode: tuple[frozenset[int], ...]
    rest: frozenset[int]

    @property
    def threads(self) -> int:
        """Of each decode worker."""
        return len(self.decode[0])


def share_cores(cores: Sequence[int], *, prefill: int, decode: int, threads: int | None) -> Pinning:
    """The last cores go to the decode workers, `threads` to each, or else equal shares among all workers.

    Raises ConfigError where nothing would be left for the others.
    """
    each = threads or max(1, len(cores) // (prefill + decode))
    taken = decode * each
    if taken >= len(cores):
        raise ConfigError(
            f"--pin: {decode} decode workers with {each} threads each leave nothing of {len(cores)} cores for the "
            "rest; start fewer, or give them fewer --threads"
        )
    ends = range(len(cores) - taken + each, len(cores) + 1, each)
    return Pinning(
        decode=tuple(frozenset(cores[end - each : end]) for end in ends),
        rest=frozenset(cores[: len(cores) - taken]),
    )
