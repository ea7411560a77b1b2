"""Weights as the native kernels read them: quantised as they were stored, packed once for all processes.

packing          rows of a checkpoint -> records of 16 outputs; gguf_blocks, groups: its quantised types
packed_recipe    what a model's packed form consists of
packed_file      the file: writing, mapping, checking
packed_folder    one packs, the others wait; which files are kept
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from libs.checkpoint.checkpoint import Checkpoint
from libs.checkpoint.errors import CheckpointError
from libs.engine.model.packed_file import PackedFileError, PackedModel, Progress, map_packed, write_packed
from libs.engine.model.packed_folder import open_shared, packed_path
from libs.engine.model.packed_recipe import Recipe, checkpoint_recipe, source_recipe
from libs.engine.model.packing import PackedMatrix
from libs.engine.model.source import TensorSource
from libs.kernels.native.formats import Format
from libs.service.logs import get_logger

__all__ = ["PackedMatrix", "PackedModel", "TensorSource", "open_packed", "pack_source"]

WAIT_S = 600.0  # for another process that packs; a model of 8 billion weights takes about a minute

log = get_logger()


def open_packed(
    checkpoint: Checkpoint,
    cache_dir: Path,
    *,
    int8: bool = False,
    on_progress: Progress | None = None,
    wait_s: float = WAIT_S,
) -> PackedModel:
    """The checkpoint's weights, mapped from a file in `cache_dir`/packed that all processes share.

    Who comes first packs it; who comes meanwhile waits. The four most recently opened files are kept, of all models
    together; other versions of this model's file are removed. Where the file cannot be made or is locked for longer
    than `wait_s`, this process packs into memory of its own and logs what that costs.

    `int8`: matrices that are stored as floats become 8-bit numbers with a scale for each 32. Raises CheckpointError
    where the checkpoint cannot be read or changes meanwhile, OSError where there is no memory either.
    """
    recipe = checkpoint_recipe(checkpoint, int8=int8)
    fingerprint = checkpoint.fingerprint(cache_dir / "fingerprints")

    def confirm() -> None:
        if checkpoint.fingerprint(cache_dir / "fingerprints") != fingerprint:
            raise CheckpointError(checkpoint.path, "changed while its weights were packed")

    path = packed_path(cache_dir / "packed", fingerprint, int8=int8)
    try:
        return open_shared(path, recipe, confirm, on_progress, wait_s)
    except (OSError, PackedFileError) as error:
        log.warning(
            "packed weights cannot be shared: each process packs its own copy at every start",
            path=str(path),
            reason=str(error),
            mib_per_process=round(recipe.num_bytes / 2**20),
        )
    return _pack_privately(recipe, on_progress)


def pack_source(source: TensorSource, formats: Mapping[str, Format] | None = None) -> PackedModel:
    """Pack float32 tensors into this process's memory: as F32, or rounded to the formats named in `formats`.

    For models that are made, not read. Raises ValueError where a format cannot hold a matrix's k.
    """
    return _pack_privately(source_recipe(source, formats or {}), None)


def _pack_privately(recipe: Recipe, on_progress: Progress | None) -> PackedModel:
    with _anonymous_file() as file:
        write_packed(file, recipe, on_progress)
        return map_packed(file.fileno(), recipe)


def _anonymous_file() -> BinaryIO:
    """Gone with its last mapping. In memory; where the system cannot do that, on a disk."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("baton-weights"), "w+b")
    return tempfile.TemporaryFile()
