"""The C interface of `src/baton.cpp`: structures and signatures for ctypes.

ctypes releases the GIL during a call. Arrays are passed as addresses: whoever passes one keeps it alive.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_void_p

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Floats = NDArray[np.float32]


class Matrix(Structure):
    """A packed matrix [n, k]; `bias` [n] or null."""

    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("format", c_int32),
        ("reserved", c_int32),
    )


class Model(Structure):
    """Shape of a model, and cos and sin of every position, [positions, head_dim / 2]."""

    _fields_ = (
        ("hidden", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("intermediate", c_int32),
        ("vocabulary", c_int32),
        ("rms_norm_eps", c_float),
        ("num_positions", c_int32),
        ("cos", c_void_p),
        ("sin", c_void_p),
    )


class Layer(Structure):
    """Weights of one layer; `q_norm` and `k_norm` [head_dim] or null."""

    _fields_ = (
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
    )


class Pool(Structure):
    """The KV pool: `libs.engine.kv.layout`."""

    _fields_ = (
        ("data", c_void_p),
        ("num_layers", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("is_half", c_int32),
        ("reserved", c_int32),
    )


class Batch(Structure):
    """Rows of several sequences, one after the other; `window` 0: rows see all before them.

    `is_drawn` 0: only the KV of the rows is wanted.
    """

    _fields_ = (
        ("num_rows", c_int32),
        ("num_sequences", c_int32),
        ("first_rows", c_void_p),
        ("starts", c_void_p),
        ("tables", c_void_p),
        ("table_offsets", c_void_p),
        ("window", c_int32),
        ("is_drawn", c_int32),
    )


def declare(library: ctypes.CDLL) -> None:
    """Gives the library's functions their signatures."""
    engine, address = c_void_p, c_void_p
    for name, result, arguments in (
        ("baton_isa", c_char_p, ()),
        ("baton_uses_amx", c_int32, ()),
        ("baton_engine_new", engine, (c_int32,)),
        ("baton_engine_delete", None, (engine,)),
        ("baton_embed", c_int32, (engine, POINTER(Matrix), address, c_int32, address)),
        ("baton_linear", c_int32, (engine, POINTER(Matrix), address, c_int32, address, c_float, address)),
        (
            "baton_layer",
            c_int32,
            (engine, POINTER(Model), POINTER(Layer), POINTER(Batch), POINTER(Pool), c_int32, address),
        ),
        (
            "baton_rope_and_write",
            c_int32,
            (engine, POINTER(Model), address, address, POINTER(Batch), POINTER(Pool), c_int32, address),
        ),
        (
            "baton_attention",
            c_int32,
            (engine, POINTER(Batch), POINTER(Pool), c_int32, c_int32, address, address),
        ),
        ("baton_rms_norm", None, (address, address, c_float, c_int32, c_int32, address)),
        ("baton_exp", None, (address, c_int32, address)),
        ("baton_silu_mul", None, (address, c_int32, c_int32, address)),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments


def check(code: int) -> None:
    """Raises MemoryError or RuntimeError where a call did not return 0."""
    if code == 1:
        raise MemoryError("the kernels found no memory for their scratch space")
    if code != 0:
        raise RuntimeError(f"a kernel failed with code {code}")


def address(array: NDArray[np.generic] | None) -> int | None:
    """Where a contiguous array's numbers are."""
    if array is None:
        return None
    if not array.flags.c_contiguous:
        raise ValueError("kernels take contiguous arrays")
    return int(array.ctypes.data)
