"""Compiling the kernels: once, whoever starts at once, and with a clear word where it cannot be."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from libs.kernels.native import compiler as compiler_module
from libs.kernels.native import library as library_module
from libs.kernels.native.compiler import Compiler, CompilerError, compile_library, find_compiler, library_path
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

    def test_one_that_cannot_compile_is_none(self, tmp_path: Path) -> None:
        broken = script(tmp_path / "cxx", 'test "$1" = --version && echo cxx 1.0')
        assert find_compiler({"CXX": script(tmp_path / "fine", "exit 0")})
        with pytest.raises(CompilerError, match="cxx"):
            find_compiler({"CXX": broken})


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

    def test_processes_that_start_at_once_compile_once(self, tmp_path: Path, compiler: Compiler) -> None:
        log = tmp_path / "log"
        slow = script(
            tmp_path / "cxx",
            f'case "$*" in *baton.cpp*) echo x >> {log}; sleep 1;; esac; exec {compiler.command[0]} "$@"',
        )
        sources = tmp_path / "src"
        sources.mkdir()
        (sources / "baton.cpp").write_text(SOURCE)
        program = f"""
from pathlib import Path
from libs.kernels.native import compiler
compiler.SOURCES = Path({str(sources)!r})
from libs.kernels.native.library import load
assert load(Path({str(tmp_path / "cache")!r}), "portable", on_progress=print).baton_abi() == 1
"""
        env = {**os.environ, "CXX": slow, "PYTHONPATH": str(ROOT)}
        started = [subprocess.Popen([sys.executable, "-c", program], env=env) for _ in range(4)]
        assert [process.wait(60) for process in started] == [0] * 4
        assert log.read_text() == "x\n"

    def test_a_failure_tells_command_and_reason(
        self, tmp_path: Path, sources: Path, compiler: Compiler
    ) -> None:
        (sources / "baton.cpp").write_text("#error no kernels today")
        with pytest.raises(NativeUnavailable, match=r"(?s)baton\.cpp.*no kernels today"):
            load(tmp_path / "cache", "portable", on_progress=print)
        assert not list((tmp_path / "cache").rglob("*.tmp"))

    def test_a_compiler_that_hangs_is_killed(self, tmp_path: Path, sources: Path) -> None:
        hanging = Compiler((script(tmp_path / "cxx", "exec sleep 60"),), "1")
        path = library_path(tmp_path / "cache", PORTABLE, hanging)
        with pytest.raises(CompilerError, match=r"over 0\.3 s"):
            compile_library(path, PORTABLE, hanging, on_progress=print, compile_s=0.3)
        assert not path.exists()

    def test_what_a_dead_process_left_is_removed(
        self, tmp_path: Path, sources: Path, compiler: Compiler
    ) -> None:
        path = library_path(tmp_path, PORTABLE, compiler)
        path.parent.mkdir(parents=True)
        left = path.with_name(f"{path.name}.abc.tmp")
        left.write_bytes(b"half a library")
        compile_library(path, PORTABLE, compiler, on_progress=print)
        assert path.exists() and not left.exists()

    @pytest.mark.parametrize("content", [b"", b"\x7fELF and no more"])
    def test_a_damaged_library_is_made_again(
        self, tmp_path: Path, sources: Path, compiler: Compiler, content: bytes
    ) -> None:
        path = library_path(tmp_path, PORTABLE, compiler)
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        assert load(tmp_path, "portable", on_progress=print).baton_abi() == 1

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
