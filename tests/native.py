"""The native kernels for tests: compiled once for all of them, and kept from run to run."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import pytest

from libs.kernels.native.compiler import CompilerError, find_compiler
from libs.kernels.native.cpu import usable_sets
from libs.kernels.native.library import load

CACHE_DIR = Path(__file__).parents[1] / ".cache" / "baton"


def usable_names() -> tuple[str, ...]:
    """Instruction sets of this machine's CPU, fastest first."""
    return tuple(one.name for one in usable_sets())


@functools.cache
def library(instruction_set: str = "auto") -> ctypes.CDLL:
    """The compiled kernels. Skips the test where there is no C++ compiler, or the CPU lacks the instructions."""
    try:
        find_compiler()
    except CompilerError as error:
        pytest.skip(f"native kernels need a C++ compiler: {error}")
    if instruction_set not in ("auto", *usable_names()):
        pytest.skip(f"this CPU has no {instruction_set}")
    return load(CACHE_DIR, instruction_set)
