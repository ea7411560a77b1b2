"""Weights of a model as torch tensors, fused where one product can do the work of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from libs.engine.model.source import TensorSource

Progress = Callable[[int, int], None]  # layers loaded, layers in all


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; matrices are [out, in], float32."""

    attn_norm: Tensor
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]: q, then k, then v
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model. `head` is `embed` itself where the two are tied."""

    embed: Tensor  # [vocabulary, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """Those that rows are multiplied with."""
        layers = (
            matrix for layer in self.layers for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down)
        )
        return (*layers, self.head)


def load_weights(source: TensorSource, on_progress: Progress | None = None) -> Weights:
    """Read every tensor once; no second copy of more than one tensor exists at a time.

    Raises what `source` raises, and ValueError where shapes do not fit together.
    """
    config = source.config
    embed = _read(source, "embed.weight")
    layers = []
    for index in range(config.num_layers):
        layers.append(_read_layer(source, index))
        if on_progress is not None:
            on_progress(index + 1, config.num_layers)
    head = embed if config.tied_head else _read(source, "head.weight")
    return Weights(embed, tuple(layers), _read(source, "norm.weight"), head)


def _read_layer(source: TensorSource, index: int) -> LayerWeights:
    config, prefix = source.config, f"layers.{index}."
    qkv = tuple(f"{prefix}{name}" for name in "qkv")
    return LayerWeights(
        attn_norm=_read(source, f"{prefix}attn_norm.weight"),
        qkv=_fuse(source, [f"{name}.weight" for name in qkv]),
        qkv_bias=_fuse(source, [f"{name}.bias" for name in qkv]) if config.qkv_bias else None,
        q_norm=_read(source, f"{prefix}q_norm.weight") if config.qk_norm else None,
        k_norm=_read(source, f"{prefix}k_norm.weight") if config.qk_norm else None,
        o=_read(source, f"{prefix}o.weight"),
        mlp_norm=_read(source, f"{prefix}mlp_norm.weight"),
        gate_up=_fuse(source, [f"{prefix}gate.weight", f"{prefix}up.weight"]),
        down=_read(source, f"{prefix}down.weight"),
    )


def _fuse(source: TensorSource, names: list[str]) -> Tensor:
    return torch.cat([_read(source, name) for name in names])


def _read(source: TensorSource, name: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(source.tensor(name), dtype=np.float32))
