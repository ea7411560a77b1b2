"""The native kernels as functions of arrays, one library for each instruction set that this CPU has."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from libs.kernels.kv import LayerKv
from libs.kernels.native.cpu import usable_sets
from libs.kernels.native.interface import Batch, Matrix, Model, Pool, address
from libs.kernels.native.kernels import Kernels
from libs.kernels.native.library import NativeUnavailable, load
from tests.kernels.packed import Floats, Packed
from tests.native import CACHE_DIR

CACHE = CACHE_DIR
NAMES = [one.name for one in usable_sets()]


@functools.cache
def kernels(instruction_set: str, threads: int = 1) -> Kernels:
    """One team for all tests: its scratch memory is as dirty as it gets."""
    try:
        return Kernels(load(CACHE, instruction_set), threads)
    except NativeUnavailable as error:
        pytest.skip(str(error))


def every_team() -> list[Kernels]:
    """Each instruction set of this CPU with one and with two threads: all must give the same bits."""
    return [kernels(name, threads) for name in NAMES for threads in (1, 2)]


@pytest.fixture(params=NAMES)
def one_set(request: pytest.FixtureRequest) -> Kernels:
    """Two threads of one instruction set."""
    return kernels(request.param, 2)


def linear(team: Kernels, x: Floats, matrix: Packed, bias: Floats | None = None) -> Floats:
    """[rows, k] -> [rows, n]"""
    return team.linear(matrix_of(matrix, bias), x)


def embed(team: Kernels, matrix: Packed, tokens: Sequence[int]) -> Floats:
    return team.embed(matrix_of(matrix), np.array(tokens, np.int32))


def attention(
    team: Kernels,
    query: Floats,
    layer: LayerKv,
    tables: Sequence[Sequence[int]],
    starts: Sequence[int],
    counts: Sequence[int],
    window: int | None = None,
) -> Floats:
    """[rows, heads, dim] -> [rows, heads * dim]; of sequence i, `counts[i]` rows from position `starts[i]` on."""
    scaled = query * np.float32(1 / np.sqrt(query.shape[2]))
    return scaled_attention(team, scaled, layer, BatchRows(tables, starts, counts, window))


def scaled_attention(team: Kernels, query: Floats, layer: LayerKv, rows: BatchRows) -> Floats:
    """The same for queries that are scaled already."""
    pool, index = pool_of(layer)
    return team.attention(rows.batch, pool, index, query)


def rope_and_write(
    team: Kernels,
    shape: Shape,
    qkv: Floats,
    layer: LayerKv,
    rows: BatchRows,
    norms: tuple[Floats, Floats] | None = None,
    eps: float = 1e-6,
) -> Floats:
    """k and v of `qkv` [rows, (heads + 2 kv_heads) * dim] go to the layer; `qkv` with q and k rotated, q scaled."""
    pool, index = pool_of(layer)
    q_norm, k_norm = norms or (None, None)
    result = qkv.copy()
    team.rope_and_write(shape.model(eps), rows.batch, pool, index, result, q_norm=q_norm, k_norm=k_norm)
    return result


def same_bits(a: Floats, b: Floats) -> bool:
    """Equal to the last bit. A NaN equals any other: which of them comes out no standard says."""
    both = np.isnan(a) & np.isnan(b)
    return a.shape == b.shape and bool(((a.view(np.int32) == b.view(np.int32)) | both).all())


@dataclass(frozen=True)
class Shape:
    """Of a model whose positions end at 64."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int = 0
    intermediate: int = 0

    @property
    def frequencies(self) -> NDArray[np.float64]:
        """Radians per position, [head_dim / 2]"""
        return 1e4 ** -(np.arange(0, self.head_dim, 2) / self.head_dim)

    @functools.cached_property
    def angles(self) -> tuple[Floats, Floats]:
        """cos and sin, each [positions, head_dim / 2]"""
        angles = np.arange(64)[:, None] * self.frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def model(self, eps: float) -> Model:
        """Valid as long as this object lives."""
        cos, sin = self.angles
        return Model(
            hidden=self.hidden,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate=self.intermediate,
            rms_norm_eps=eps,
            num_positions=len(cos),
            cos=address(cos),
            sin=address(sin),
        )


class BatchRows:
    """Rows of several sequences: `counts[i]` from position `starts[i]` on. Keeps the arrays that `batch` points to."""

    def __init__(
        self,
        tables: Sequence[Sequence[int]],
        starts: Sequence[int],
        counts: Sequence[int],
        window: int | None = None,
        *,
        is_drawn: bool = True,
    ) -> None:
        sizes = [len(table) for table in tables]
        self._arrays = {
            "first_rows": np.cumsum([0, *counts], dtype=np.int32),
            "starts": np.array(starts, np.int32),
            "tables": np.array([block for table in tables for block in table], np.int32),
            "table_offsets": np.cumsum([0, *sizes[:-1]], dtype=np.int32),
        }
        addresses = {name: address(array) for name, array in self._arrays.items()}
        self.batch = Batch(
            num_rows=sum(counts),
            num_sequences=len(starts),
            window=window or 0,
            is_drawn=is_drawn,
            **addresses,
        )


def matrix_of(matrix: Packed, bias: Floats | None = None) -> Matrix:
    """As the library takes it; valid as long as both arguments live."""
    data = address(matrix.data)
    return Matrix(data=data, bias=address(bias), n=matrix.n, k=matrix.k, format=int(matrix.format))


def pool_of(layer: LayerKv) -> tuple[Pool, int]:
    """The pool that `layer` is a part of, and which layer of it."""
    _, num_kv_heads, dim, block_size = layer.keys.shape
    layer_size = 2 * num_kv_heads * dim * block_size
    pool = Pool(
        data=layer.keys.untyped_storage().data_ptr(),
        num_layers=layer.keys.stride(0) // layer_size,
        num_kv_heads=num_kv_heads,
        head_dim=dim,
        block_size=block_size,
        is_half=layer.keys.itemsize == 2,
    )
    return pool, layer.keys.storage_offset() // layer_size
