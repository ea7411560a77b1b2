"""What libraries under torch read from the environment. Imports no torch: it has to be set before.

MKL_CBWR: free MKL picks kernels by shape, and each rounds differently; under `<branch>,STRICT` a row of a product
has the same bits whatever the number of rows beside it and of threads (`determinism` measures whether it has).
MKL reads it at its first call. The branch is the best that the CPU has. Branches round differently: where workers
on CPUs of different kinds serve together, give all of them the same one (`determinism.numerics` tells whether they
agree).

GOMP_SPINCOUNT: OpenMP's threads spin while they wait for each other, a millisecond and more. Where prefill, decode
and everything else share the cores, a spinning thread keeps the one it waits for from running, and steps take
several times as long; threads that sleep at once make short steps of a quiet machine up to twice as long. A thousand
turns cost little of either. OpenMP reads it when torch is imported; a set OMP_WAIT_POLICY is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

MKL_VARIABLE = "MKL_CBWR"
SPIN_VARIABLE = "GOMP_SPINCOUNT"
_AVX512 = frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"})


def prepare() -> None:
    """Sets what is not set, for this process and its children."""
    os.environ.setdefault(MKL_VARIABLE, mkl_branch(cpu_flags()))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPIN_VARIABLE, "1000")


def mkl_branch(cpu_flags: Iterable[str]) -> str:
    """The fastest branch with strict reproducibility that a CPU with these flags can run."""
    return "AVX512,STRICT" if frozenset(cpu_flags) >= _AVX512 else "AVX2,STRICT"


def cpu_flags() -> frozenset[str]:
    """CPU features as Linux lists them; none where there is no such list."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
