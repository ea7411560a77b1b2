"""What this machine can do: float32 products and reading memory, with the threads that the engine gets.

python -m libs.bench.limits gemm 2      prints GFLOP/s of each repeat, as JSON
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from libs.bench.figures import GEMM, READ, Figure
from libs.wire.errors import BatonError

_GEMM_SIZE = 2048
_GEMM_TIMEOUT_S = 300.0
_READ_BYTES = 512 << 20  # above any cache
_GEMM_VARIABLES = ("MKL_CBWR", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def gemm_peak(threads: int, repeats: int) -> Figure:
    """GFLOP/s of a float32 product of 2048^3 by torch.

    In a process of its own: torch would stay resident in this one. That process has none of Baton's settings
    for the BLAS, so this is the BLAS at its fastest, not at the exactness that Baton asks of it.
    Raises BatonError where torch cannot be run.
    """
    command = [sys.executable, "-P", "-m", "libs.bench.limits", "gemm", str(threads), str(repeats)]
    environment = {name: value for name, value in os.environ.items() if name not in _GEMM_VARIABLES}
    environment["OMP_NUM_THREADS"] = str(threads)
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_GEMM_TIMEOUT_S, check=True
        )
        values = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or ["no output"]
        raise BatonError(f"the float32 product cannot be measured: {last[0]}") from error
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise BatonError(f"the float32 product cannot be measured: {error}") from error
    return Figure(GEMM, "GFLOP/s", tuple(values))


def read_bandwidth(threads: int, repeats: int, num_bytes: int = _READ_BYTES) -> Figure:
    """GB/s of `threads` threads that read memory once, front to back.

    Each takes the maximum of its part's bytes: of numpy's reductions the one with the least arithmetic per byte
    (sums are slower than memory is).
    """
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        values = _read_times(memory, threads, repeats)
    return Figure(READ, "GB/s", tuple(num_bytes / value / 1e9 for value in values))


def _read_times(memory: mmap.mmap, threads: int, repeats: int) -> list[float]:
    data = np.frombuffer(memory, np.uint8)
    data.fill(1)
    parts = np.array_split(data, threads)
    with ThreadPoolExecutor(threads) as pool:

        def read() -> None:
            assert all(value == 1 for value in pool.map(np.max, parts))

        return _times(read, repeats)


def _times(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each repeat, after one that does not count."""
    work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return times


def _gemm_main(threads: int, repeats: int) -> None:
    import torch

    torch.set_num_threads(threads)
    a, b = torch.rand(_GEMM_SIZE, _GEMM_SIZE), torch.rand(_GEMM_SIZE, _GEMM_SIZE)
    out = torch.empty(_GEMM_SIZE, _GEMM_SIZE)
    times = _times(lambda: torch.mm(a, b, out=out), repeats)
    print(json.dumps([2 * _GEMM_SIZE**3 / seconds / 1e9 for seconds in times]))


if __name__ == "__main__":
    _gemm_main(int(sys.argv[2]), int(sys.argv[3]))
