"""The Llama family on the native kernels: packed weights, KV in the paged pool, no torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from libs.checkpoint.config import ModelConfig
from libs.checkpoint.rope import rope_frequencies
from libs.engine.kv.pool import KvPool
from libs.engine.model.native_batch import NativeBatch
from libs.engine.model.packed import PackedMatrix, PackedModel
from libs.engine.plan import StepAbandoned, never
from libs.kernels.native.interface import Floats, Layer, Matrix, Model, Pool, address
from libs.kernels.native.kernels import Kernels


class NativeLlama:
    """Holds weights and scratch memory, no state of any request. For one thread at a time."""

    def __init__(self, packed: PackedModel, pool: KvPool, kernels: Kernels) -> None:
        self.config = packed.config
        self._packed = packed  # keeps the weights mapped
        self._kernels = kernels
        num_positions = min(pool.num_blocks * pool.layout.block_size, self.config.context_length)
        self._angles = _angles(self.config, num_positions)
        self._model = _model(self.config, num_positions, *self._angles)
        self._layers = [_layer(packed, index) for index in range(self.config.num_layers)]
        self._embed = _matrix(packed.matrices["embed.weight"])
        self._head = _matrix(packed.matrices.get("head.weight", packed.matrices["embed.weight"]))
        self._norm = packed.vectors["norm.weight"]
        self._pool_bytes = np.frombuffer(pool.map, np.uint8)  # keeps the pool mapped
        self._num_blocks = pool.num_blocks
        self._pool = _pool(pool, self._pool_bytes)
        self._logits = np.empty(
            (0, self.config.vocab_size), np.float32
        )  # kept: fresh memory costs page faults

    def forward(self, batch: NativeBatch, is_abandoned: Callable[[], bool] = never) -> Floats:
        """Write the KV of the batch's tokens to the pool; logits of the drawn ones, [drawn, vocabulary].

        The logits stand until the next call. Raises StepAbandoned before the next layer, ValueError for tokens,
        positions or blocks that the model or the pool does not have: the kernels would read what lies behind.
        """
        self._check(batch)
        structure = batch.structure()
        hidden = self._kernels.embed(self._embed, batch.tokens)
        for index, layer in enumerate(self._layers):
            if is_abandoned():
                raise StepAbandoned
            self._kernels.layer(self._model, layer, structure, self._pool, index, hidden)
        if len(batch.drawn) > len(self._logits):
            self._logits = np.empty((len(batch.drawn), self.config.vocab_size), np.float32)
        out = self._logits[: len(batch.drawn)]
        eps = self.config.rms_norm_eps
        return self._kernels.linear(self._head, hidden[batch.drawn], norm=self._norm, eps=eps, out=out)

    def _check(self, batch: NativeBatch) -> None:
        if len(batch.tokens) == 0:
            return
        ends = batch.starts + np.diff(batch.first_rows)
        for what, values, limit in (
            ("token", batch.tokens, self.config.vocab_size),
            ("position", ends - 1, self._model.num_positions),
            ("block", batch.tables, self._num_blocks),
        ):
            if values.min() < 0 or values.max() >= limit:
                raise ValueError(f"a {what} is outside 0 to {limit - 1}")


def _angles(config: ModelConfig, num_positions: int) -> tuple[Floats, Floats]:
    """cos and sin, each [positions, head_dim / 2], computed in float64."""
    angles = np.arange(num_positions, dtype=np.float64)[:, None] * rope_frequencies(config)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _model(config: ModelConfig, num_positions: int, cos: Floats, sin: Floats) -> Model:
    return Model(
        hidden=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        num_positions=num_positions,
        cos=address(cos),
        sin=address(sin),
    )


def _layer(packed: PackedModel, index: int) -> Layer:
    prefix = f"layers.{index}."
    vectors = packed.vectors
    layer = Layer(
        attention_norm=address(vectors[f"{prefix}attn_norm.weight"]),
        mlp_norm=address(vectors[f"{prefix}mlp_norm.weight"]),
        q_norm=address(vectors.get(f"{prefix}q_norm.weight")),
        k_norm=address(vectors.get(f"{prefix}k_norm.weight")),
    )
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        bias = vectors.get(f"{prefix}{name}.bias")
        setattr(layer, name, _matrix(packed.matrices[f"{prefix}{name}.weight"], address(bias)))
    return layer


def _matrix(packed: PackedMatrix, bias: int | None = None) -> Matrix:
    return Matrix(data=address(packed.data), bias=bias, n=packed.n, k=packed.k, format=int(packed.format))


def _pool(pool: KvPool, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Pool:
    layout = pool.layout
    return Pool(
        data=ctypes.c_void_p(data.ctypes.data),
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        is_half=layout.dtype == "f16",
    )
