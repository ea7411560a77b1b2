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


def _load_from(
    cache_dir: Path, chosen: InstructionSet, compiler: Compiler, on_progress: OnProgress
) -> ctypes.CDLL:
    path = library_path(cache_dir, chosen, compiler)
    try:
        compile_library(path, chosen, compiler, on_progress=on_progress)
    except OSError as error:
        _log.warning(
            "kernels cannot be kept, so each start compiles them", cache=str(cache_dir), reason=str(error)
        )
        with tempfile.TemporaryDirectory(prefix="baton-kernels-") as folder:
            path = library_path(Path(folder), chosen, compiler)
            compile_library(path, chosen, compiler, on_progress=on_progress)
            return _open(path)
    try:
        return _open(path)
    except OSError as error:  # a damaged file
        _log.warning("compiled kernels are damaged; compiling them again", path=str(path), reason=str(error))
        compile_library(path, chosen, compiler, on_progress=on_progress, renew=True)
    try:
        return _open(path)
    except OSError as error:
        raise CompilerError(f"compiled kernels cannot be loaded: {error}") from error


def _open(path: Path) -> ctypes.CDLL:
    """Raises OSError for a file that is not our library."""
    library = ctypes.CDLL(str(path))
    try:
        abi = int(library.baton_abi())
    except AttributeError:
        raise OSError(f"{path} has no baton_abi") from None
    if abi != ABI:
        raise OSError(f"{path} has ABI {abi}, not {ABI}")
    return library
