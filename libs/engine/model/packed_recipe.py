"""What the packed form of a model consists of, and how to make each part of it, piece by piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from libs.checkpoint.checkpoint import Checkpoint
from libs.checkpoint.config import ModelConfig
from libs.checkpoint.parameters import parameters
from libs.engine.model.groups import Bytes
from libs.engine.model.packing import format_of, pack_floats, pack_rows, piece_rows
from libs.engine.model.source import TensorSource
from libs.kernels.native.formats import Format, matrix_bytes


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix, or a vector of float32 (no format). `pieces` makes its bytes, in order."""

    name: str
    shape: tuple[int, ...]
    format: Format | None
    pieces: Callable[[], Iterator[Bytes]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * 4 if self.format is None else matrix_bytes(self.format, *self.shape)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model's parts in the order of their use."""

    config: ModelConfig
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        """Of weights; files add a header, a table and padding."""
        return sum(part.num_bytes for part in self.parts)


def checkpoint_recipe(checkpoint: Checkpoint, *, int8: bool = False) -> Recipe:
    """Every matrix in the type that the checkpoint stores; `int8`: floats become 8-bit numbers, a scale per 32."""
    return Recipe(
        checkpoint.config, tuple(_stored_part(checkpoint, name, int8) for name in checkpoint.tensor_names)
    )


def source_recipe(source: TensorSource, formats: Mapping[str, Format]) -> Recipe:
    """Float32 tensors packed as `formats` says by name, as F32 where it says nothing."""
    parts = []
    for parameter in parameters(source.config):
        is_matrix = len(parameter.shape) == 2
        format = formats.get(parameter.name, Format.F32) if is_matrix else None
        pieces = partial(_source_pieces, source, parameter.name, parameter.shape, format)
        parts.append(Part(parameter.name, parameter.shape, format, pieces))
    return Recipe(source.config, tuple(parts))


def _stored_part(checkpoint: Checkpoint, name: str, int8: bool) -> Part:
    stored = checkpoint.stored(name)
    if len(stored.shape) == 1:
        return Part(name, stored.shape, None, partial(_source_pieces, checkpoint, name, stored.shape, None))
    format = format_of(stored.type_name, stored.shape[1], int8=int8)
    return Part(name, stored.shape, format, partial(_stored_pieces, checkpoint, name, format))


def _stored_pieces(checkpoint: Checkpoint, name: str, format: Format) -> Iterator[Bytes]:
    num_rows, k = checkpoint.stored(name).shape
    step = piece_rows(k)
    for start in range(0, num_rows, step):
        raw = checkpoint.raw(name, range(start, min(start + step, num_rows)))
        yield pack_rows(raw.type_name, raw.data, format)


def _source_pieces(
    source: TensorSource, name: str, shape: tuple[int, ...], format: Format | None
) -> Iterator[Bytes]:
    values = np.ascontiguousarray(source.tensor(name), np.float32)
    if values.shape != shape:
        raise ValueError(f"{name!r} has shape {list(values.shape)}, not {list(shape)}")
    if format is None:
        yield values.view(np.uint8)
        return
    step = piece_rows(values.shape[1])
    for start in range(0, len(values), step):
        yield pack_floats(values[start : start + step], format)
