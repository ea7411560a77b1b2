"""Compiling the kernels: once, whoever starts at once, and with a clear word where it cannot be."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from libs.kernels.native import compiler as compiler_module
from libs.kernels.native import library as library_module
from libs.kernels.native.compiler import (
    Compiler,
    CompilerError,
    compile_library,
    find_compiler,
    is_whole,
    library_path,
)
from libs.kernels.native.cpu import AVX2, AVX512, PORTABLE, compiler_flags, usable_sets
from libs.kernels.native.library import NativeUnavailable, load

ROOT = Path(__file__).parents[2]
SOURCE = """
extern "C" __attribute__((visibility("default"))) int baton_abi() { return 1; }
"""


@pytest.fixture
def compiler() -> Compiler:
    try:
        return find_compiler()
    except CompilerError as error:
        pytest.skip(str(error))


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile in no time, instead of the kernels."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "baton.cpp").write_text(SOURCE)
    monkeypatch.setattr(compiler_module, "SOURCES", folder)
    return folder


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline, "did not happen within 10 s"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def load_elsewhere(sources: Path, cache: Path, cxx: str) -> subprocess.Popen[bytes]:
    """A process of its own that loads the library, as a service does."""
    program = f"""
from pathlib import Path
from libs.kernels.native import compiler
compiler.SOURCES = Path({str(sources)!r})
from libs.kernels.native.library import load
assert load(Path({str(cache)!r}), "portable", on_progress=print).baton_abi() == 1
"""
    env = {**os.environ, "CXX": cxx, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", program], env=env)


class TestInstructionSets:
    def test_the_best_comes_first(self) -> None:
        assert usable_sets(AVX512.needs | AVX2.needs, "x86_64") == (AVX512, AVX2, PORTABLE)
        assert usable_sets(AVX2.needs, "AMD64") == (AVX2, PORTABLE)
        assert usable_sets((), "x86_64") == (PORTABLE,)
        assert usable_sets(AVX512.needs, "aarch64") == (PORTABLE,)

    def test_one_missing_feature_rules_a_set_out(self) -> None:
        for feature in AVX512.needs:
            assert AVX512 not in usable_sets(AVX512.needs - {feature}, "x86_64")

    def test_the_matrix_unit_is_used_where_the_cpu_has_it(self) -> None:
        assert "-mamx-int8" in compiler_flags(AVX512, {"amx_tile", "amx_int8"})
        assert "-mamx-int8" not in compiler_flags(AVX512, {"amx_tile"})
        assert "-mamx-int8" not in compiler_flags(AVX2, {"amx_tile", "amx_int8"})

    def test_asking_for_what_the_cpu_lacks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library_module, "usable_sets", lambda: (PORTABLE,))
        with pytest.raises(NativeUnavailable, match=r"'avx2'.*portable"):
            load(tmp_path, "avx2")


class TestFindingACompiler:
    def test_none(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(CompilerError, match=r"c\+\+, g\+\+, clang\+\+.*install"):
            find_compiler({})

    def test_cxx_is_the_users_word(self, tmp_path: Path, compiler: Compiler) -> None:
        with pytest.raises(CompilerError, match="no-such-compiler"):
            find_compiler({"CXX": "no-such-compiler"})
        assert find_compiler({"CXX": f"{compiler.command[0]} -O1"}).command == (compiler.command[0], "-O1")
        with pytest.raises(CompilerError, match=r"CXX.*quotation"):
            find_compiler({"CXX": 'g++ "'})

    def test_one_that_cannot_compile_is_none(self, tmp_path: Path) -> None:
        broken = script(tmp_path / "cxx", 'test "$1" = --version && echo cxx 1.0')
        assert find_compiler({"CXX": script(tmp_path / "fine", "exit 0")})
        with pytest.raises(CompilerError, match="cxx"):
            find_compiler({"CXX": broken})

    def test_one_that_does_not_know_the_matrix_unit(
        self, tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "libs.kernels.native.cpu.cpu_flags", lambda: AVX512.needs | {"amx_tile", "amx_int8"}
        )
        told = tmp_path / "told"
        refusing = f'echo "$*" >> {told}; case "$*" in *-mamx*) exit 1;; esac; echo old 1.0'
        old = find_compiler({"CXX": script(tmp_path / "old", refusing)})
        new = find_compiler({"CXX": script(tmp_path / "new", "echo new 1.0")})
        assert (old.has_amx, new.has_amx) == (False, True)
        compile_library(library_path(tmp_path, AVX512, old), AVX512, old, on_progress=print)
        last = told.read_text().splitlines()[-1]
        assert "-mavx512vnni" in last and "-mamx" not in last


class TestCompiling:
    def test_once(self, tmp_path: Path, sources: Path, compiler: Compiler) -> None:
        said: list[str] = []
        for _ in range(2):
            library = load(tmp_path / "cache", "portable", on_progress=said.append)
            assert library.baton_abi() == 1
        assert [line.split()[0] for line in said] == ["compiling", "compiled"]

    def test_another_source_or_compiler_is_another_library(
        self, tmp_path: Path, sources: Path, compiler: Compiler
    ) -> None:
        before = library_path(tmp_path, PORTABLE, compiler)
        assert before != library_path(tmp_path, AVX2, compiler)
        assert before != library_path(tmp_path, PORTABLE, Compiler(compiler.command, "another version"))
        (sources / "new.h").write_text("// new")
        assert before != library_path(tmp_path, PORTABLE, compiler)

    @pytest.mark.parametrize("num_processes", [2, 4])
    @pytest.mark.parametrize("is_damaged", [False, True])
    def test_processes_that_start_at_once_compile_once(
        self, tmp_path: Path, sources: Path, compiler: Compiler, num_processes: int, is_damaged: bool
    ) -> None:
        log = tmp_path / "log"
        slow = script(
            tmp_path / "cxx",
            f'case "$*" in *baton.cpp*) echo x >> {log}; sleep 1;; esac; exec {compiler.command[0]} "$@"',
        )
        cache = tmp_path / "cache"
        path = library_path(cache, PORTABLE, find_compiler({"CXX": slow}))
        if is_damaged:
            path.parent.mkdir(parents=True)
            path.write_bytes(b"\x7fELF")
        started = [load_elsewhere(sources, cache, slow) for _ in range(num_processes)]
        assert [process.wait(60) for process in started] == [0] * num_processes
        assert log.read_text() == "x\n"
        assert {file.name for file in path.parent.iterdir()} == {path.name, "lock"}

    def test_a_process_killed_while_it_compiles_holds_nobody_up(
        self, tmp_path: Path, sources: Path, compiler: Compiler
    ) -> None:
        pid_file, cache = tmp_path / "pid", tmp_path / "cache"
        # The first to compile hangs, with half a library written; who comes later does not.
        hangs = f"test -e {pid_file} || {{ echo half > $last; echo $$ > {pid_file}; exec sleep 60; }}"
        cxx = script(
            tmp_path / "cxx",
            f'for last in "$@"; do :; done; case "$*" in *baton.cpp*) {hangs};; esac; exec {compiler.command[0]} "$@"',
        )
        killed, waiting = load_elsewhere(sources, cache, cxx), None
        try:
            wait_until(lambda: pid_file.exists() and pid_file.read_text().strip())
            waiting = load_elsewhere(sources, cache, cxx)
            killed.send_signal(signal.SIGKILL)
            assert killed.wait(10) == -signal.SIGKILL
            assert waiting.wait(60) == 0
        finally:
            for process in (killed, waiting):
                if process is not None:
                    process.kill()
                    process.wait()
            if pid_file.exists():
                os.kill(int(pid_file.read_text()), signal.SIGKILL)  # the hanging compiler
        assert not list(cache.rglob("*.tmp"))

    def test_a_failure_tells_command_and_reason(
        self, tmp_path: Path, sources: Path, compiler: Compiler
    ) -> None:
        (sources / "baton.cpp").write_text("#error no kernels today")
        with pytest.raises(NativeUnavailable, match=r"(?s)baton\.cpp.*no kernels today"):
            load(tmp_path / "cache", "portable", on_progress=print)
        assert not list((tmp_path / "cache").rglob("*.tmp"))

    def test_a_compiler_that_hangs_is_killed_with_all_it_started(self, tmp_path: Path, sources: Path) -> None:
        pass_file = tmp_path / "pass"
        hanging = Compiler((script(tmp_path / "cxx", f"sleep 60 & echo $! > {pass_file}; wait"),), "1")
        path = library_path(tmp_path / "cache", PORTABLE, hanging)
        with pytest.raises(CompilerError, match=r"over 0\.5 s"):
            compile_library(path, PORTABLE, hanging, on_progress=print, compile_s=0.5)
        wait_until(lambda: not is_running(int(pass_file.read_text())))
        assert not path.exists() and not list(path.parent.glob("*.tmp"))

    def test_waiting_for_another_process_ends(
        self, tmp_path: Path, sources: Path, compiler: Compiler
    ) -> None:
        path = library_path(tmp_path, PORTABLE, compiler)
        path.parent.mkdir(parents=True)
        said: list[str] = []
        with (path.parent / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(CompilerError, match=r"another process.*0\.2 s"):
                compile_library(path, PORTABLE, compiler, on_progress=said.append, compile_s=0.2)
        assert said == ["waiting for another process that compiles the kernels"]

    def test_what_a_dead_process_left_is_removed(
        self, tmp_path: Path, sources: Path, compiler: Compiler
    ) -> None:
        path = library_path(tmp_path, PORTABLE, compiler)
        path.parent.mkdir(parents=True)
        left = path.with_name(f"{path.name}.abc.tmp")
        left.write_bytes(b"half a library")
        compile_library(path, PORTABLE, compiler, on_progress=print)
        assert path.exists() and not left.exists()

    @pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.9])
    def test_a_library_cut_short_is_made_again(
        self, tmp_path: Path, sources: Path, compiler: Compiler, kept: float
    ) -> None:
        path = library_path(tmp_path, PORTABLE, compiler)
        compile_library(path, PORTABLE, compiler, on_progress=print)
        content = path.read_bytes()
        path.write_bytes(content[: int(kept * len(content))])
        # Elsewhere: the system's loader does not refuse such a file, it kills the process.
        assert load_elsewhere(sources, tmp_path, compiler.command[0]).wait(60) == 0
        assert is_whole(path)

    def test_a_library_with_a_changed_byte_is_made_again(
        self, tmp_path: Path, sources: Path, compiler: Compiler
    ) -> None:
        path = library_path(tmp_path, PORTABLE, compiler)
        compile_library(path, PORTABLE, compiler, on_progress=print)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        said: list[str] = []
        assert load(tmp_path, "portable", on_progress=said.append).baton_abi() == 1
        assert said and is_whole(path)

    def test_a_cache_that_libraries_cannot_be_loaded_from(
        self, tmp_path: Path, sources: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refused = [str(tmp_path / "cache")]

        def load_library(path: str) -> ctypes.CDLL:
            if path.startswith(tuple(refused)):
                raise OSError(f"{path}: failed to map segment from shared object")  # a mount with noexec
            return real(path)

        real = ctypes.CDLL
        monkeypatch.setattr(library_module.ctypes, "CDLL", load_library)
        assert load(tmp_path / "cache", "portable", on_progress=print).baton_abi() == 1
        refused.append(tempfile.gettempdir())
        with pytest.raises(NativeUnavailable, match="failed to map"):
            load(tmp_path / "cache", "portable", on_progress=print)

    def test_a_library_of_another_interface_is_refused(
        self, tmp_path: Path, sources: Path, compiler: Compiler
    ) -> None:
        (sources / "baton.cpp").write_text(SOURCE.replace("return 1", "return 999"))
        with pytest.raises(NativeUnavailable, match="ABI 999"):
            load(tmp_path, "portable", on_progress=print)

    def test_a_cache_that_cannot_be_written(self, tmp_path: Path, sources: Path, compiler: Compiler) -> None:
        (tmp_path / "file").touch()
        library = load(tmp_path / "file" / "cache", "portable", on_progress=print)
        assert isinstance(library, ctypes.CDLL) and library.baton_abi() == 1

    def test_old_libraries_go(
        self, tmp_path: Path, sources: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compiler_module, "_KEPT", 2)
        for number in range(4):
            (sources / "version.h").write_text(str(number))
            path = library_path(tmp_path, PORTABLE, compiler)
            compile_library(path, PORTABLE, compiler, on_progress=print)
            os.utime(path, (number, number))
        assert len(list(tmp_path.rglob("*.so"))) == 2 and path.exists()
