"""Which instruction sets the kernels can be compiled for, and which of them this machine runs."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass

from libs.kernels.environment import cpu_flags

_X86 = ("x86_64", "amd64")
_AMX_FLAGS = frozenset({"amx_tile", "amx_int8"})
AMX_COMPILER_FLAGS = ("-mamx-tile", "-mamx-int8")


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """`needs` are CPU features as Linux names them, `compiler_flags` what makes a compiler use them."""

    name: str
    needs: frozenset[str]
    compiler_flags: tuple[str, ...]


AVX512 = InstructionSet(
    "avx512vnni",
    frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx2", "fma", "f16c"}),
    ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c"),
)
AVX2 = InstructionSet("avx2", frozenset({"avx2", "fma", "f16c"}), ("-mavx2", "-mfma", "-mf16c"))
PORTABLE = InstructionSet("portable", frozenset(), ())
INSTRUCTION_SETS = (AVX512, AVX2, PORTABLE)  # fastest first


def usable_sets(flags: Iterable[str] | None = None, machine: str | None = None) -> tuple[InstructionSet, ...]:
    """Fastest first; portable is always the last. Without arguments: of this machine."""
    machine = platform.machine() if machine is None else machine
    if machine.lower() not in _X86:
        return (PORTABLE,)
    present = frozenset(cpu_flags() if flags is None else flags)
    return tuple(one for one in INSTRUCTION_SETS if one.needs <= present)


def compiler_flags(instruction_set: InstructionSet, flags: Iterable[str] | None = None) -> tuple[str, ...]:
    """Of the instruction set, and of the matrix unit (AMX) where an AVX-512 CPU has one."""
    present = frozenset(cpu_flags() if flags is None else flags)
    if instruction_set is AVX512 and present >= _AMX_FLAGS:
        return (*instruction_set.compiler_flags, *AMX_COMPILER_FLAGS)
    return instruction_set.compiler_flags
