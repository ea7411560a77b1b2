"""Checks of cores, memory and devices."""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import subprocess
from pathlib import Path

from libs.service.config import Settings
from services.cli.checks.finding import Finding
from services.cli.machine import cores

_GIB = 1024**3
_MIN_MEMORY_GIB = 4.0  # two workers with the smallest model
_COMMAND_TIMEOUT_S = 10.0


def cpu_cores(_: Settings) -> Finding:
    count = cores()
    if count < 2:
        return Finding("cores", "warn", f"{count}", "prefill and decode share one core; expect slow answers")
    return Finding("cores", "ok", f"{count}")


def memory(_: Settings) -> Finding:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = _meminfo().get("MemAvailable", pages)
    fact = f"{available / _GIB:.1f} GiB free of {pages / _GIB:.1f}"
    if available < _MIN_MEMORY_GIB * _GIB:
        advice = f"under {_MIN_MEMORY_GIB:g} GiB: choose a small model and set BATON_KV_CACHE_MIB"
        return Finding("memory", "warn", fact, advice)
    return Finding("memory", "ok", fact)


def cpu_features(_: Settings) -> Finding:
    flags = _cpu_flags()
    wanted = {"avx2": "avx2", "fma": "fma", "f16c": "f16c", "avx512f": "avx512", "avx512_bf16": "avx512-bf16",
              "amx_tile": "amx"}  # fmt: skip
    have = [name for flag, name in wanted.items() if flag in flags]
    fact = ", ".join(have) or "no vector extensions that Baton knows"
    if flags and "avx2" not in flags:
        return Finding("cpu features", "warn", fact, "no AVX2: answers are right, but slow")
    return Finding("cpu features", "ok", fact)


def gpu(_: Settings) -> Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("gpu", "ok", "none; models run on the CPU")
    command = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    if done.returncode != 0:
        return Finding("gpu", "warn", "nvidia-smi fails", "the NVIDIA driver does not work; reinstall it")
    return Finding("gpu", "ok", "; ".join(done.stdout.strip().splitlines()))


def shared_memory(_: Settings) -> Finding:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return Finding("/dev/shm", "warn", "absent", "mount a tmpfs on /dev/shm")
    fact = f"{usage.free / _GIB:.1f} GiB free of {usage.total / _GIB:.1f}"
    if usage.free < _GIB // 16:
        advice = "under 64 MiB: in a container, start it with --shm-size=1g"
        return Finding("/dev/shm", "warn", fact, advice)
    return Finding("/dev/shm", "ok", fact)


def passing_memory(_: Settings) -> Finding:
    """Really does what a handoff does: memory made here, its descriptor sent, its bytes read there."""
    name = "memory handoff"
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there:
        try:
            fd = os.memfd_create("baton-doctor")
        except (OSError, AttributeError) as error:
            return Finding(name, "missing", f"no memfd: {error}", "Baton needs Linux 3.17 or newer")
        try:
            os.write(fd, b"baton")
            socket.send_fds(here, [b"x"], [fd])
            received = socket.recv_fds(there, 1, 1)[1][0]
        finally:
            os.close(fd)
        try:
            with mmap.mmap(received, 5, prot=mmap.PROT_READ) as memory_map:
                whole = memory_map[:] == b"baton"
        finally:
            os.close(received)
    if not whole:
        return Finding(name, "missing", "memory passed between processes reads back wrong")
    return Finding(name, "ok", "memfd and descriptor passing work")


def _meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}


def _cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.split(":", 1)[1].split())
    return set()
