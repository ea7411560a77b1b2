"""What the native kernels need: a compiler, and what it made so far."""

from __future__ import annotations

from libs.kernels.native.compiler import CompilerError, find_compiler, library_path
from libs.kernels.native.library import NativeUnavailable, choose
from libs.service.config import Settings
from services.cli.checks.finding import Finding

_FALLBACK = "requests are served through torch, several times slower"


def compiler(_: Settings) -> Finding:
    try:
        found = find_compiler()
    except CompilerError as error:
        return Finding("compiler", "warn", str(error), f"without one, {_FALLBACK}")
    return Finding("compiler", "ok", f"{found.command[0]} ({found.version})")


def kernels(settings: Settings) -> Finding:
    if settings.engine in ("torch", "fake"):
        return Finding("kernels", "ok", f"not used: engine is {settings.engine}")
    try:
        chosen = choose(settings.kernels)
        path = library_path(settings.cache_dir, chosen, find_compiler())
    except NativeUnavailable as error:
        return Finding(
            "kernels", "missing", str(error), "choose others with --kernels, or leave the choice to Baton"
        )
    except CompilerError:
        return Finding(
            "kernels", "warn", f"none: {_FALLBACK}", "install a C++ compiler, e.g. apt-get install g++"
        )
    state = (
        f"compiled, {path}"
        if path.exists()
        else "will be compiled at the first start, which takes up to a minute"
    )
    return Finding("kernels", "ok", f"{chosen.name}: {state}")
