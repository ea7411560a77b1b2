"""The cluster under chaos: a real `baton up`, two workers of each role, and what must be true of it at rest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.e2e.running import Baton

ROLES = Counter({"prefill": 2, "decode": 2, "cache": 1, "gateway": 1})
CALM_S = 90.0  # the supervisor waits up to 30 s before it starts a process that keeps dying
# Links to three peers come and go, a thread and its copying threads each; what leaks grows beyond any of these.
SPARE = {"tasks": 2, "fds": 12, "threads": 15}
WORKER_OPTIONS = ("--threads", "1", "--kv-cache-mib", "96", "--max-step-tokens", "128")
Footprint = dict[str, dict[str, int]]  # by role


def new_town(state_dir: Path, *arguments: str) -> Town:
    """Two workers of each role, on this host."""
    workers = ("--prefill", "2", "--decode", "2", *WORKER_OPTIONS)
    return Town(Baton(state_dir, *workers, "--store-mib", "256", *arguments))


class Town:
    """Owns the processes. `pids` of all, NATS included; `calm` waits for peace and looks for what is left over."""

    def __init__(self, baton: Baton) -> None:
        self.baton = baton
        self._usual: Footprint | None = None

    def pids(self) -> dict[str, int]:
        found = {}
        for pid in _children(self.baton.process.pid):
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            names = [pair.partition(b"=")[2] for pair in environ if pair.startswith(b"BATON_INSTANCE_ID=")]
            found[names[0].decode() if names else "nats-1"] = pid
        return found

    def calm(self, within_s: float = CALM_S) -> None:
        """Returns once every process is there, idle and empty-handed. Fails with what is wrong after `within_s`."""
        deadline = time.monotonic() + within_s
        while wrong := self._wrong(self.baton.json("status")):
            assert time.monotonic() < deadline, f"no peace {within_s:g} s after the storm: {wrong}"
            time.sleep(0.3)

    def _wrong(self, statuses: list[dict[str, Any]]) -> list[str]:
        wrong = [f"{name} of {ROLES[name]}" for name in ROLES if _count(statuses)[name] != ROLES[name]]
        for status in statuses:
            who, load, detail = status["instance_id"], status["load"], status["detail"]
            if status["state"] not in ("serving", "ready"):
                wrong.append(f"{who} is {status['state']}: {detail.get('reason', '')}")
            if load is not None and (load["running"] or load["waiting"]):
                wrong.append(f"{who} has requests: {load}")
            if load is not None and load["blocks_free"] + load["blocks_cached"] != load["blocks_total"]:
                wrong.append(f"{who} holds blocks: {load}")
            if detail.get("leases"):
                wrong.append(f"{who} has {detail['leases']} leases")
            if status["inflight"]:
                wrong.append(f"{who} has {status['inflight']} requests in flight")
        return wrong or self._left_over(statuses)

    def _left_over(self, statuses: list[dict[str, Any]]) -> list[str]:
        """Against the first time that there was peace."""
        now = _footprint(statuses)
        if self._usual is None:
            self._usual = now
        return [
            f"{role} has {count} {what}, {usual} before"
            for role, counts in now.items()
            for what, count in counts.items()
            if count > (usual := self._usual[role][what]) + SPARE[what]
        ]

    def stop(self) -> None:
        """Ends it; then no process of it may be left. Fails otherwise."""
        pids = list(self.pids().values())
        code = self.baton.stop()
        assert code == 0, "".join(self.baton.output[-40:])
        left = [pid for pid in pids if _is_alive(pid)]
        assert not left, f"processes left over: {left}"


def _count(statuses: list[dict[str, Any]]) -> Mapping[str, int]:
    return Counter(status["service"] for status in statuses)


def _footprint(statuses: list[dict[str, Any]]) -> Footprint:
    """The most that a process of each role holds."""
    found: Footprint = {}
    for status in statuses:
        most = found.setdefault(status["service"], dict.fromkeys(SPARE, 0))
        for what in SPARE:
            most[what] = max(most[what], int(status["detail"][what]))
    return found


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
