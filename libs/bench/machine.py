"""The machine and the versions that figures were measured with."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("baton", "numpy", "torch", "transformers")
# What kernels are chosen by; other flags say nothing about speed here.
_TELLING_FLAGS = (
    "avx2", "f16c", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8",
    "amx_bf16", "asimd", "asimddp", "i8mm", "sve",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """`cpus` that this process may use, `flags` those instruction sets that kernels are chosen by."""

    cpu: str
    cpus: int
    flags: tuple[str, ...]
    memory_gib: float
    kernel: str
    python: str
    versions: dict[str, str]

    def line(self) -> str:
        """For people, in one line."""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"{self.cpu}, {self.cpus} CPUs, {self.memory_gib:.0f} GiB ({' '.join(self.flags)}); "
            f"Linux {self.kernel}, Python {self.python}, {versions}"
        )


def describe(cpuinfo: Path = Path("/proc/cpuinfo")) -> Machine:
    """This machine; what it does not tell is `unknown`."""
    try:
        text = cpuinfo.read_text(encoding="ascii", errors="replace")
    except OSError:
        text = ""
    flags = _field(text, "flags") or _field(text, "Features")
    return Machine(
        cpu=_field(text, "model name") or platform.processor() or "unknown",
        cpus=len(os.sched_getaffinity(0)),
        flags=tuple(flag for flag in _TELLING_FLAGS if flag in flags.split()),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30),
        kernel=platform.release(),
        python=platform.python_version(),
        versions=_versions(),
    )


def _field(cpuinfo: str, name: str) -> str:
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
