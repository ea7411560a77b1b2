"""A layer in one call has the bits of its operations called one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from libs.kernels.kv import LayerKv
from libs.kernels.native.formats import Format
from libs.kernels.native.interface import Layer, address
from libs.kernels.native.kernels import Kernels
from tests.kernels.native_rig import (
    BatchRows,
    Shape,
    every_team,
    linear,
    matrix_of,
    pool_of,
    same_bits,
    scaled_attention,
)
from tests.kernels.packed import Floats, Packed, random_packed

EPS = 1e-5
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


def normal(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape, np.float32)


@dataclass(frozen=True)
class Weights:
    """Of one layer. `biases` are those of q, k and v; head norms are of q and k."""

    matrices: dict[str, Packed]
    biases: dict[str, Floats]
    norms: tuple[Floats, Floats]
    head_norms: tuple[Floats, Floats] | None

    def structure(self) -> Layer:
        q_norm, k_norm = self.head_norms or (None, None)
        return Layer(
            **{name: matrix_of(self.matrices[name], self.biases.get(name)) for name in MATRICES},
            attention_norm=address(self.norms[0]),
            mlp_norm=address(self.norms[1]),
            q_norm=address(q_norm),
            k_norm=address(k_norm),
        )


def random_weights(rng: np.random.Generator, shape: Shape, formats: Sequence[Format], plain: bool) -> Weights:
    """`plain`: no biases and no head norms."""
    hidden, inner, dim = shape.hidden, shape.intermediate, shape.head_dim
    query, keys = shape.num_heads * dim, shape.num_kv_heads * dim
    sizes = [
        (query, hidden), (keys, hidden), (keys, hidden), (hidden, query),
        (inner, hidden), (inner, hidden), (hidden, inner),
    ]  # fmt: skip
    names = zip(MATRICES, formats, sizes, strict=True)
    return Weights(
        {name: random_packed(rng, format, n, k) for name, format, (n, k) in names},
        {} if plain else {"q": normal(rng, query), "k": normal(rng, keys), "v": normal(rng, keys)},
        (normal(rng, hidden), normal(rng, hidden)),
        None if plain else (normal(rng, dim), normal(rng, dim)),
    )


def one_by_one(
    team: Kernels, shape: Shape, weights: Weights, layer: LayerKv, rows: BatchRows, hidden: Floats
) -> Floats:
    """What `Kernels.layer` should do to `hidden` and to the pool."""
    matrices, biases = weights.matrices, weights.biases
    pool, index = pool_of(layer)
    normed = team.rms_norm(hidden, weights.norms[0], EPS)
    qkv = np.concatenate([linear(team, normed, matrices[name], biases.get(name)) for name in "qkv"], axis=1)
    q_norm, k_norm = weights.head_norms or (None, None)
    team.rope_and_write(shape.model(EPS), rows.batch, pool, index, qkv, q_norm=q_norm, k_norm=k_norm)
    width = shape.num_heads * shape.head_dim
    query = np.ascontiguousarray(qkv[:, :width]).reshape(len(qkv), -1, shape.head_dim)
    hidden = hidden + linear(team, scaled_attention(team, query, layer, rows), matrices["o"])
    normed = team.rms_norm(hidden, weights.norms[1], EPS)
    gate_up = np.concatenate([linear(team, normed, matrices[name]) for name in ("gate", "up")], axis=1)
    return hidden + linear(team, team.silu_mul(gate_up), matrices["down"])


def in_one(
    team: Kernels, shape: Shape, weights: Weights, layer: LayerKv, rows: BatchRows, hidden: Floats
) -> Floats:
    pool, index = pool_of(layer)
    team.layer(shape.model(EPS), weights.structure(), rows.batch, pool, index, hidden)
    return hidden


SHAPES = {
    "even": Shape(hidden=96, intermediate=160, num_heads=6, num_kv_heads=2, head_dim=16),
    "odd tiles": Shape(hidden=32, intermediate=32 * 3, num_heads=4, num_kv_heads=4, head_dim=8),
}
UNEVEN = Shape(hidden=50, intermediate=70, num_heads=3, num_kv_heads=1, head_dim=10)  # float formats only
MIXED = [
    Format.Q4_F16, Format.Q8_F32, Format.F16, Format.Q8X2_F32, Format.Q4_F32, Format.F32, Format.Q8_F32_MIN,
]  # fmt: skip
LAYERS = [
    *((shape, [format] * 7, True) for shape in SHAPES.values() for format in Format),
    (SHAPES["even"], MIXED, False),
    (UNEVEN, [Format.F32] * 7, False),
]


@pytest.mark.parametrize(("shape", "formats", "plain"), LAYERS, ids=lambda value: str(value)[:60])
def test_layer(shape: Shape, formats: list[Format], plain: bool) -> None:
    rng = np.random.default_rng(0)
    weights = random_weights(rng, shape, formats, plain)
    start = torch.from_numpy(normal(rng, 8, 2, 2, shape.num_kv_heads, 16 * shape.head_dim)).half()
    tables, starts, counts = [[0, 3], [5, 1], [7]], [12, 30, 0], [20, 1, 2]
    hidden = normal(rng, sum(counts), shape.hidden)
    results = []
    for team in every_team():
        for call in (one_by_one, in_one):
            pool = start.clone()
            layer = LayerKv.of(pool[:, 1], shape.head_dim)
            out = call(team, shape, weights, layer, BatchRows(tables, starts, counts), hidden.copy())
            results.append((out, pool.numpy().tobytes()))
    assert np.isfinite(results[0][0]).all()
    for out, pool_bytes in results:
        assert same_bits(out, results[0][0])
        assert pool_bytes == results[0][1]


@pytest.mark.parametrize("index", [0, 1], ids=["first layer", "last layer"])
def test_rows_that_nobody_draws(index: int) -> None:
    """They leave their KV behind; of the last layer nothing else is computed. Many times: threads may overtake."""
    rng, shape = np.random.default_rng(1), SHAPES["even"]
    weights = random_weights(rng, shape, MIXED, plain=False)
    start = torch.from_numpy(normal(rng, 4, 2, 2, shape.num_kv_heads, 16 * shape.head_dim)).half()
    where = ([[0, 3], [1]], [12, 0], [9, 1])
    hidden = normal(rng, 10, shape.hidden)
    for team in every_team():
        drawn_pool = start.clone()
        layer = LayerKv.of(drawn_pool[:, index], shape.head_dim)
        drawn = in_one(team, shape, weights, layer, BatchRows(*where), hidden.copy())
        for _ in range(300):
            pool = start.clone()
            layer = LayerKv.of(pool[:, index], shape.head_dim)
            rows = BatchRows(*where, is_drawn=False)
            out = in_one(team, shape, weights, layer, rows, hidden.copy())
            assert same_bits(out, drawn if index == 0 else hidden)
            assert torch.equal(pool, drawn_pool)
