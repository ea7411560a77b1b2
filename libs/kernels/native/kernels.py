"""The kernels as functions of numpy arrays, run by a team of threads."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np

from libs.kernels.native.interface import (
    Batch,
    Floats,
    Int32s,
    Layer,
    Matrix,
    Model,
    Pool,
    address,
    check,
    declare,
)


class Kernels:
    """One team of threads and its scratch memory: one call at a time. The bits of a result depend on neither."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        """Raises MemoryError where no threads can be had."""
        declare(library)
        self.threads = threads
        self._library = library
        self._engine = library.baton_engine_new(threads)
        if not self._engine:
            raise MemoryError(f"no {threads} threads can be started")
        weakref.finalize(self, library.baton_engine_delete, self._engine)

    @property
    def instruction_set(self) -> str:
        """What the library was compiled for, e.g. "avx512vnni+amx"."""
        name = str(self._library.baton_isa().decode())
        return f"{name}+amx" if self.uses_amx else name

    @property
    def uses_amx(self) -> bool:
        """Whether the matrix unit of recent Xeons does the integer products of long chunks."""
        return bool(self._library.baton_uses_amx())

    def embed(self, embedding: Matrix, tokens: Int32s) -> Floats:
        """Rows of the matrix: [tokens] -> [tokens, k]"""
        out = np.empty((len(tokens), embedding.k), np.float32)
        check(self._library.baton_embed(self._engine, embedding, address(tokens), len(tokens), address(out)))
        return out

    def linear(
        self,
        matrix: Matrix,
        x: Floats,
        *,
        norm: Floats | None = None,
        eps: float = 0.0,
        out: Floats | None = None,
    ) -> Floats:
        """x @ matrix.T + its bias: [rows, k] -> [rows, n]; with `norm` [k], x is normalised first (rms_norm)."""
        out = np.empty((len(x), matrix.n), np.float32) if out is None else out
        arguments = (address(x), len(x), address(norm), eps, address(out))
        check(self._library.baton_linear(self._engine, matrix, *arguments))
        return out

    def layer(self, model: Model, layer: Layer, batch: Batch, pool: Pool, index: int, hidden: Floats) -> None:
        """`hidden` [rows, hidden] goes through layer `index`, in place; KV of the rows is written to the pool."""
        check(self._library.baton_layer(self._engine, model, layer, batch, pool, index, address(hidden)))

    def rope_and_write(
        self,
        model: Model,
        batch: Batch,
        pool: Pool,
        index: int,
        qkv: Floats,
        *,
        q_norm: Floats | None = None,
        k_norm: Floats | None = None,
    ) -> None:
        """q and k of `qkv` [rows, (heads + 2 kv_heads) * head_dim] are rotated in place, q also scaled by
        1 / sqrt(head_dim); k and v are written to the pool."""
        norms = (address(q_norm), address(k_norm))
        check(
            self._library.baton_rope_and_write(self._engine, model, *norms, batch, pool, index, address(qkv))
        )

    def attention(self, batch: Batch, pool: Pool, index: int, query: Floats) -> Floats:
        """Causal attention of scaled queries [rows, heads, head_dim] over the pool: [rows, heads * head_dim]"""
        rows, num_heads, head_dim = query.shape
        out = np.empty((rows, num_heads * head_dim), np.float32)
        arguments = (batch, pool, index, num_heads, address(query), address(out))
        check(self._library.baton_attention(self._engine, *arguments))
        return out

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        """x / sqrt(mean(x^2) + eps) * weight: [rows, dim], [dim] -> [rows, dim]"""
        out = np.empty_like(x)
        self._library.baton_rms_norm(address(x), address(weight), eps, *x.shape, address(out))
        return out

    def exp(self, x: Floats) -> Floats:
        """exp(x) for x between -87 and 88, [n]; below, that of -87."""
        out = np.empty_like(x)
        self._library.baton_exp(address(x), x.size, address(out))
        return out

    def silu_mul(self, gate_up: Floats) -> Floats:
        """silu(gate) * up: [rows, 2 * dim] -> [rows, dim]"""
        rows, width = gate_up.shape
        out = np.empty((rows, width // 2), np.float32)
        self._library.baton_silu_mul(address(gate_up), rows, width // 2, address(out))
        return out
