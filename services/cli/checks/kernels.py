"""What the native kernels need: a compiler, and what it made so far."""

from __future__ import annotations

import os
from pathlib import Path

from libs.kernels.native.compiler import CompilerError, find_compiler, is_whole, library_path
from libs.kernels.native.library import NativeUnavailable, choose
from libs.service.config import Settings
from services.cli.checks.finding import Finding, Level

_INSTALL = "install a C++ compiler, e.g. apt-get install g++"


def compiler(settings: Settings) -> Finding:
    try:
        found = find_compiler()
    except CompilerError as error:
        if not _are_used(settings):
            return Finding("compiler", "ok", f"not needed: engine is {settings.engine}")
        return Finding("compiler", _level_without(settings), str(error), f"without one, {_without(settings)}")
    return Finding("compiler", "ok", f"{found.command[0]} ({found.version})")


def kernels(settings: Settings) -> Finding:
    if not _are_used(settings):
        return Finding("kernels", "ok", f"not used: engine is {settings.engine}")
    try:
        chosen = choose(settings.kernels)
        path = library_path(settings.cache_dir, chosen, find_compiler())
    except NativeUnavailable as error:
        return Finding(
            "kernels", "missing", str(error), "choose others with --kernels, or leave the choice to Baton"
        )
    except CompilerError:
        return Finding("kernels", _level_without(settings), f"none: {_without(settings)}", _INSTALL)
    if is_whole(path):
        return Finding("kernels", "ok", f"{chosen.name}: compiled, {path}")
    if not _can_be_written(path.parent):
        fact = (
            f"{chosen.name}: {path.parent} cannot be written, so each start compiles them for up to a minute"
        )
        return Finding("kernels", "warn", fact, "choose another one with --cache-dir")
    return Finding(
        "kernels", "ok", f"{chosen.name}: will be compiled at the first start, which takes up to a minute"
    )


def _are_used(settings: Settings) -> bool:
    return settings.engine in ("auto", "native")


def _must_have(settings: Settings) -> bool:
    """Whether workers refuse to start without kernels, as `libs.engine.build.choose_engine` has it."""
    return settings.engine == "native" or settings.kernels != "auto"


def _level_without(settings: Settings) -> Level:
    return "missing" if _must_have(settings) else "warn"


def _without(settings: Settings) -> str:
    if _must_have(settings):
        return f"workers do not start (engine={settings.engine}, kernels={settings.kernels})"
    return "requests are served through torch, several times slower"


def _can_be_written(folder: Path) -> bool:
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
