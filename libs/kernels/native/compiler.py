"""Compiles the kernels with the machine's C++ compiler, once, into a cache that all processes share.

A library in the cache ends in a digest of itself (the loader reads only what its headers name, and ignores it).
Without it, a file that a full disk or a power cut left short would not be an error: the loader maps it, and the
process dies by SIGBUS at the first page that is not there, at every start again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from libs.kernels.native.cpu import AMX_COMPILER_FLAGS, InstructionSet, compiler_flags
from libs.service.file_lock import LockTimeout, every, file_lock

SOURCES = Path(__file__).parent / "src"
COMPILE_S = 300.0  # a compiler that takes longer is killed
_PROBE_S = 30.0
_REPORT_S = 10.0
_KEPT = 6  # libraries in the cache: a few versions for a few instruction sets
_DIGEST_BYTES = hashlib.sha256().digest_size
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
    """`version` is the first line of what it says of itself; `has_amx`: it knows the matrix unit (g++ since 11)."""

    command: tuple[str, ...]
    version: str
    has_amx: bool = False


def find_compiler(environment: dict[str, str] | None = None) -> Compiler:
    """$CXX if it is set, else the first of c++, g++ and clang++ that runs. Raises CompilerError."""
    chosen = _chosen((os.environ if environment is None else environment).get("CXX", ""))
    for command in [chosen] if chosen else [[name] for name in _CANDIDATES]:
        path = shutil.which(command[0])
        compiler = _identify((path, *command[1:])) if path else None
        if compiler:
            return compiler
    looked = f"$CXX is {shlex.join(chosen)!r}" if chosen else f"looked for $CXX, {', '.join(_CANDIDATES)}"
    raise CompilerError(f"no C++ compiler was found ({looked}); install one, e.g. apt install g++")


def library_path(cache_dir: Path, instruction_set: InstructionSet, compiler: Compiler) -> Path:
    """Where the library lies once it is made: its name tells sources, flags, compiler and machine."""
    digest = hashlib.sha256()
    for part in (*_flags(instruction_set, compiler), *compiler.command, compiler.version, platform.machine()):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return cache_dir / "kernels" / f"{instruction_set.name}-{digest.hexdigest()[:24]}.so"


def is_whole(path: Path) -> bool:
    """Whether `path` is there, and what was once compiled: neither cut short nor changed."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def compile_library(
    path: Path,
    instruction_set: InstructionSet,
    compiler: Compiler,
    *,
    on_progress: OnProgress,
    compile_s: float = COMPILE_S,
) -> None:
    """Makes `path`, unless it is there and whole. One process compiles, others wait for it.

    A process that dies while it compiles leaves nothing that misleads the next. Raises CompilerError, OSError
    where `path` cannot be written.
    """
    if is_whole(path):
        return
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock", compile_s, on_progress):
        if is_whole(path):
            return  # made by the process that we waited for
        started = time.monotonic()
        on_progress(
            f"compiling kernels for {instruction_set.name}, once on this machine: takes up to a minute"
        )
        _compile(path, _flags(instruction_set, compiler), compiler, compile_s)
        on_progress(f"compiled kernels for {instruction_set.name} in {time.monotonic() - started:.0f} s")
        _forget_old(folder)


def _flags(instruction_set: InstructionSet, compiler: Compiler) -> tuple[str, ...]:
    flags = compiler_flags(instruction_set)
    if not compiler.has_amx:  # slower, and the same bits
        flags = tuple(flag for flag in flags if flag not in AMX_COMPILER_FLAGS)
    return (*_FLAGS, *flags)


def _compile(path: Path, flags: tuple[str, ...], compiler: Compiler, compile_s: float) -> None:
    for left_over in path.parent.glob("*.tmp"):  # of processes that died: nobody else has the lock
        left_over.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    made = Path(name)
    command = [*compiler.command, *flags, str(SOURCES / "baton.cpp"), "-o", name]
    try:
        result = _run(command, compile_s)
        if result.returncode != 0:
            tail = "\n".join(result.stderr.strip().splitlines()[-8:])
            raise CompilerError(f"the compiler failed: {shlex.join(command)}\n{tail}")
        digest = hashlib.sha256(made.read_bytes()).digest()
        with made.open("ab") as file:
            file.write(digest)
        made.chmod(0o755)
        made.replace(path)
    except subprocess.TimeoutExpired:
        raise CompilerError(f"the compiler took over {compile_s:g} s: {shlex.join(command)}") from None
    finally:
        made.unlink(missing_ok=True)


def _run(command: Sequence[str], limit_s: float, text: str = "") -> subprocess.CompletedProcess[str]:
    """`text` goes to its input. Raises OSError where it cannot start, TimeoutExpired after `limit_s`.

    A compiler is a driver that starts passes: they form a group, so that whatever ends the wait ends all of them.
    """
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace", process_group=0,
    ) as process:  # fmt: skip
        try:
            stdout, stderr = process.communicate(text, limit_s)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


@contextmanager
def _locked(path: Path, wait_s: float, on_progress: OnProgress) -> Iterator[None]:
    """Raises CompilerError after `wait_s`."""
    say = every(
        _REPORT_S, lambda waited_s: on_progress("waiting for another process that compiles the kernels")
    )
    try:
        with file_lock(path, wait_s, say):
            yield
    except LockTimeout as error:
        raise CompilerError(str(error)) from None


def _chosen(text: str) -> list[str]:
    """The words of $CXX; none where it is not set. Raises CompilerError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise CompilerError(f"$CXX is {text!r}: {error}") from None


def _identify(command: tuple[str, ...]) -> Compiler | None:
    """None where it does not run, or cannot compile C++17."""
    try:
        told = _run([*command, "--version"], _PROBE_S)
        if told.returncode != 0 or not _accepts(command, ()):
            return None
        version = (told.stdout.splitlines() or ["unknown"])[0]
        return Compiler(command, version, _accepts(command, AMX_COMPILER_FLAGS))
    except (OSError, subprocess.TimeoutExpired):
        return None


def _accepts(command: tuple[str, ...], flags: tuple[str, ...]) -> bool:
    program = "#include <new>\nint main() { if constexpr (__cplusplus >= 201703L) return 0; }\n"
    arguments = ("-std=c++17", *flags, "-fsyntax-only", "-x", "c++", "-")
    return _run([*command, *arguments], _PROBE_S, program).returncode == 0


def _forget_old(folder: Path) -> None:
    libraries = sorted(folder.glob("*.so"), key=lambda file: file.stat().st_mtime, reverse=True)
    for library in libraries[_KEPT:]:
        library.unlink(missing_ok=True)
