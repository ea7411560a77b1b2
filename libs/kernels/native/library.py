"""The compiled kernels, loaded: for the best instruction set of the machine, or for the one that is asked for."""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path

from libs.kernels.native.compiler import (
    Compiler,
    CompilerError,
    OnProgress,
    compile_library,
    find_compiler,
    library_path,
)
from libs.kernels.native.cpu import INSTRUCTION_SETS, InstructionSet, usable_sets
from libs.service.logs import get_logger

ABI = 1  # of src/baton.cpp
_log = get_logger()


class NativeUnavailable(Exception):
    """There are no native kernels here; the message says why, and what to do."""


def choose(name: str) -> InstructionSet:
    """ "auto" is the best of this machine. Raises NativeUnavailable for one that it does not have."""
    usable = usable_sets()
    if name == "auto":
        return usable[0]
    for one in usable:
        if one.name == name:
            return one
    known = ", ".join(one.name for one in INSTRUCTION_SETS)
    raise NativeUnavailable(
        f"this CPU does not run {name!r} kernels; it runs {', '.join(one.name for one in usable)} (known: {known})"
    )


def load(
    cache_dir: Path, instruction_set: str = "auto", *, on_progress: OnProgress | None = None
) -> ctypes.CDLL:
    """Loads the library, compiling it first where the cache has none. Raises NativeUnavailable."""
    chosen = choose(instruction_set)
    try:
        compiler = find_compiler()
        return _load_from(cache_dir, chosen, compiler, on_progress or _log.info)
    except CompilerError as error:
        raise NativeUnavailable(str(error)) from error
    except OSError as error:
        raise NativeUnavailable(f"kernels can neither be kept nor loaded: {error}") from error


def _load_from(
    cache_dir: Path, chosen: InstructionSet, compiler: Compiler, on_progress: OnProgress
) -> ctypes.CDLL:
    """Raises CompilerError, and OSError where neither the cache nor a temporary folder serves."""
    try:
        return _made(cache_dir, chosen, compiler, on_progress)
    except OSError as error:  # read-only, full, mounted noexec, made on a machine with another C library
        _log.warning(
            "kernels cannot be kept, so each start compiles them", cache=str(cache_dir), reason=str(error)
        )
    with tempfile.TemporaryDirectory(prefix="baton-kernels-") as folder:
        return _made(Path(folder), chosen, compiler, on_progress)


def _made(folder: Path, chosen: InstructionSet, compiler: Compiler, on_progress: OnProgress) -> ctypes.CDLL:
    path = library_path(folder, chosen, compiler)
    compile_library(path, chosen, compiler, on_progress=on_progress)
    return _open(path)


def _open(path: Path) -> ctypes.CDLL:
    """Raises OSError for a file that does not load, CompilerError for one that was made of other sources."""
    library = ctypes.CDLL(str(path))
    try:
        abi = int(library.baton_abi())
    except AttributeError:
        raise CompilerError(f"{path} has no baton_abi") from None
    if abi != ABI:
        raise CompilerError(
            f"{path} has ABI {abi}, not {ABI}: sources and Python code are of different versions"
        )
    return library
