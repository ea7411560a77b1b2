"""What is done to processes: kill, stop and go on, restart."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Pids = Callable[[], dict[str, int]]  # instance id -> process id of what runs now

HEARTBEAT_LOSS_S = 2.0


@dataclass(frozen=True, slots=True)
class Fault:
    """`stopped_s` is for "stop" only: SIGSTOP, and SIGCONT after so long."""

    victim: str  # an instance id
    action: str  # kill, restart, stop
    after_s: float
    stopped_s: float = 0.0

    def __str__(self) -> str:
        how = f"stop for {self.stopped_s:.2f} s" if self.action == "stop" else self.action
        return f"{self.victim}: {how} after {self.after_s:.2f} s"


def make_faults(rng: random.Random, victims: Iterable[str]) -> list[Fault]:
    """One or two. Stops are shorter and longer than what takes a worker for dead."""
    return [_fault(rng, victim) for victim in rng.sample(sorted(victims), rng.choice([1, 1, 2]))]


def _fault(rng: random.Random, victim: str) -> Fault:
    action = rng.choice(["kill", "restart", "stop", "stop"])
    stopped_s = rng.choice([rng.uniform(0.1, 1.5), rng.uniform(HEARTBEAT_LOSS_S, 3 * HEARTBEAT_LOSS_S)])
    return Fault(victim, action, rng.uniform(0.0, 2.5), stopped_s if action == "stop" else 0.0)


async def inflict(fault: Fault, pids: Pids) -> None:
    """A victim that does not run at the moment, after another fault, is spared."""
    await asyncio.sleep(fault.after_s)
    pid = pids().get(fault.victim)
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        if fault.action == "kill":
            os.kill(pid, signal.SIGKILL)
        elif fault.action == "restart":
            os.kill(pid, signal.SIGTERM)
        else:
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(fault.stopped_s)
            finally:
                os.kill(pid, signal.SIGCONT)
