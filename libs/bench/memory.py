"""Memory of a process, with what it shares counted in parts (PSS)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from libs.wire.errors import BatonError

_POOL = "/memfd:baton-kv"


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes. `kv_bytes` is the part of `pss_bytes` that lies in KV pools: what was written of them so far."""

    pss_bytes: int
    kv_bytes: int

    @property
    def beside_kv_bytes(self) -> int:
        return self.pss_bytes - self.kv_bytes


def resident(pid: int | None = None) -> Resident:
    """Of this process, or of another of the same user. Raises BatonError where Linux does not tell."""
    path = Path("/proc") / ("self" if pid is None else str(pid)) / "smaps"
    try:
        return parse_smaps(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise BatonError(f"cannot read the memory of a process: {error}") from error


def parse_smaps(text: str) -> Resident:
    """Sums the `Pss:` lines of /proc/PID/smaps, which follow a line with addresses and file of each mapping."""
    pss = kv = 0
    in_pool = False
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if name == "Pss:":
            num_bytes = int(rest.split()[0]) * 1024
            pss += num_bytes
            kv += num_bytes if in_pool else 0
        elif not name.endswith(":"):
            in_pool = _POOL in rest
    return Resident(pss, kv)
