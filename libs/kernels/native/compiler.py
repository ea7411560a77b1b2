"""Compiles the kernels with the machine's C++ compiler, once, into a cache that all processes share."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from libs.kernels.native.cpu import InstructionSet, compiler_flags

SOURCES = Path(__file__).parent / "src"
COMPILE_S = 300.0  # a compiler that takes longer is killed
_PROBE_S = 30.0
_KEPT = 6  # libraries in the cache: a few versions for a few instruction sets
_CANDIDATES = ("c++", "g++", "clang++")
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"),
    # The same bits everywhere: no multiplication and addition may become one operation, or the other way round.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)

OnProgress = Callable[[str], None]


class CompilerError(Exception):
    """No kernels could be made; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """`version` is the first line of what it says of itself."""

    command: tuple[str, ...]
    version: str


def find_compiler(environment: dict[str, str] | None = None) -> Compiler:
    """$CXX if it is set, else the first of c++, g++ and clang++ that runs. Raises CompilerError."""
    chosen = shlex.split((os.environ if environment is None else environment).get("CXX", ""))
    for command in [chosen] if chosen else [[name] for name in _CANDIDATES]:
        path = shutil.which(command[0])
        version = _version((path, *command[1:])) if path else None
        if path and version:
            return Compiler((path, *command[1:]), version)
    looked = f"$CXX is {shlex.join(chosen)!r}" if chosen else f"looked for $CXX, {', '.join(_CANDIDATES)}"
    raise CompilerError(f"no C++ compiler was found ({looked}); install one, e.g. apt install g++")


def library_path(cache_dir: Path, instruction_set: InstructionSet, compiler: Compiler) -> Path:
    """Where the library lies once it is made: its name tells sources, flags, compiler and machine."""
    digest = hashlib.sha256()
    for part in (*_flags(instruction_set), *compiler.command, compiler.version, platform.machine()):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return cache_dir / "kernels" / f"{instruction_set.name}-{digest.hexdigest()[:24]}.so"


def compile_library(
    path: Path,
    instruction_set: InstructionSet,
    compiler: Compiler,
    *,
    on_progress: OnProgress,
    compile_s: float = COMPILE_S,
    renew: bool = False,
) -> None:
    """Makes `path`, unless it is there (`renew`: even then). One process compiles, others wait for it.

    A process that dies while it compiles leaves nothing that misleads the next. Raises CompilerError, OSError
    where `path` cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not renew:
        return
    with _locked(path.with_suffix(".lock"), compile_s, on_progress):
        if path.exists() and not renew:
            return  # made by the process that we waited for
        started = time.monotonic()
        on_progress(
            f"compiling kernels for {instruction_set.name}, once on this machine: takes up to a minute"
        )
        _compile(path, _flags(instruction_set), compiler, compile_s)
        on_progress(f"compiled kernels for {instruction_set.name} in {time.monotonic() - started:.0f} s")
        _forget_old(path.parent)


def _flags(instruction_set: InstructionSet) -> tuple[str, ...]:
    return (*_FLAGS, *compiler_flags(instruction_set))


def _compile(path: Path, flags: tuple[str, ...], compiler: Compiler, compile_s: float) -> None:
    for left_over in path.parent.glob(
        f"{path.name}.*.tmp"
    ):  # of a process that died: nobody else has the lock
        left_over.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    made = Path(name)
    command = [*compiler.command, *flags, str(SOURCES / "baton.cpp"), "-o", name]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=compile_s, check=False)
        if result.returncode != 0:
            tail = "\n".join(result.stderr.strip().splitlines()[-8:])
            raise CompilerError(f"the compiler failed: {shlex.join(command)}\n{tail}")
        made.chmod(0o755)
        made.replace(path)
    except subprocess.TimeoutExpired:
        raise CompilerError(f"the compiler took over {compile_s:g} s: {shlex.join(command)}") from None
    finally:
        made.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path, wait_s: float, on_progress: OnProgress) -> Iterator[None]:
    """Holds the lock file; the system takes it from a process that dies. Raises CompilerError after `wait_s`."""
    deadline = time.monotonic() + wait_s
    is_told = False
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CompilerError(f"another process has held {path} for {wait_s:g} s") from None
                if not is_told:
                    on_progress("waiting for another process that compiles the kernels")
                    is_told = True
                time.sleep(0.05)
        yield


def _version(command: tuple[str, ...]) -> str | None:
    """None where it does not run, or cannot compile C++17."""
    try:
        told = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=_PROBE_S, check=True
        )
        program = "#include <new>\nint main() { if constexpr (__cplusplus >= 201703L) return 0; }\n"
        subprocess.run(
            [*command, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"],
            input=program,
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return (told.stdout.splitlines() or ["unknown"])[0]


def _forget_old(folder: Path) -> None:
    libraries = sorted(folder.glob("*.so"), key=lambda file: file.stat().st_mtime, reverse=True)
    for library in libraries[_KEPT:]:
        library.unlink(missing_ok=True)
        library.with_suffix(".lock").unlink(missing_ok=True)
