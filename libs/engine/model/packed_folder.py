"""The folder of packed files: one process packs while the others wait, and old files go.

    <folder>/lock                       held (flock) by the one process that packs, whatever the model
    <folder>/<name>.<random>.tmp        what it writes; left behind only by a process that was killed
    <folder>/<model>-v<version>*.baton  whole files; in use or not, they may be removed at any time

Only who holds the lock makes or removes files. A file that has its name was synced before.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from libs.engine.model.packed_file import (
    VERSION,
    PackedFileError,
    PackedModel,
    Progress,
    map_packed,
    write_packed,
)
from libs.engine.model.packed_recipe import Recipe
from libs.service.file_lock import every, file_lock
from libs.service.logs import get_logger

MAX_FILES: Final = 4  # the most recently opened are kept, of all models together
_SUFFIX: Final = ".baton"
_REPORT_S: Final = 10.0

log = get_logger()


def packed_path(folder: Path, fingerprint: str, *, int8: bool) -> Path:
    """The file of a model. Its name changes with whatever changes its content."""
    return folder / f"{fingerprint}-v{VERSION}{'-int8' if int8 else ''}{_SUFFIX}"


def open_shared(
    path: Path, recipe: Recipe, confirm: Callable[[], None], on_progress: Progress | None, wait_s: float
) -> PackedModel:
    """Map the file at `path`; pack it where it is absent, and again where it is damaged.

    `confirm` raises where the source of the recipe is not what it was before packing. Raises OSError where the
    folder cannot be used (TimeoutError: another process packs for longer than `wait_s`), PackedFileError where a
    file that was just written is damaged, and what the source raises.
    """
    with suppress(PackedFileError, FileNotFoundError):
        return _open(path, recipe)
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(path.parent / "lock", wait_s, every(_REPORT_S, _say_waiting)):
        try:
            return _open(path, recipe)  # somebody packed meanwhile
        except FileNotFoundError:
            pass
        except PackedFileError as error:
            log.warning("packed weights are damaged and made again", path=str(path), reason=str(error))
        _remove_old(path)  # first: there may be no room for both
        _pack(path, recipe, confirm, on_progress)
        return _open(path, recipe)


def _open(path: Path, recipe: Recipe) -> PackedModel:
    with path.open("rb") as file:
        model = map_packed(file.fileno(), recipe)
        with suppress(OSError):
            os.utime(path)
        return model


def _pack(path: Path, recipe: Recipe, confirm: Callable[[], None], on_progress: Progress | None) -> None:
    started = time.monotonic()
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w+b") as file:
            write_packed(file, recipe, on_progress)
            os.fsync(file.fileno())
        confirm()
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    log.info("weights packed", path=str(path), seconds=round(time.monotonic() - started, 1))


def _remove_old(path: Path) -> None:
    """What killed processes left, this model's files of other versions, and of the rest those not used for longest."""
    model = path.name.partition("-")[0]
    current = {packed_path(path.parent, model, int8=int8) for int8 in (False, True)}
    for abandoned in path.parent.glob("*.tmp"):
        abandoned.unlink(missing_ok=True)
    kept = []
    for other in path.parent.glob(f"*{_SUFFIX}"):
        if other.name.startswith(f"{model}-") and other not in current:
            other.unlink(missing_ok=True)
        elif other != path:
            kept.append((other.stat().st_mtime_ns, other))
    for _, other in sorted(kept, reverse=True)[MAX_FILES - 1 :]:
        other.unlink(missing_ok=True)


def _say_waiting(waited_s: float) -> None:
    log.info("waiting for another process that packs weights", waited_s=round(waited_s))
