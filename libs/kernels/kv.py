"""KV of tokens into the pool, and tiles of blocks out of it.

A pool is one tensor in float16 or float32, `[block, *KvLayout.block_shape]`. Kernels take one layer of it, a `LayerKv`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from libs.kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class LayerKv:
    """Views of one layer of a pool; blocks are not adjacent."""

    keys: Tensor  # [block, kv_head, dim, token]
    values: Tensor  # [block, kv_head, token, dim]

    @staticmethod
    def of(pool_layer: Tensor, head_dim: int) -> LayerKv:
        """From `pool[:, layer]`: [block, k or v, kv_head, block_size * head_dim]"""
        keys, values = pool_layer[:, 0], pool_layer[:, 1]
        return LayerKv(keys.view(*keys.shape[:2], head_dim, -1), values.view(*values.shape[:2], -1, head_dim))

    @property
    def block_size(self) -> int:
        return self.values.shape[2]

    def copy(self) -> LayerKv:
        """Of the elements, out of the pool."""
        return LayerKv(self.keys.clone(), self.values.clone())


def kv_write_reference(layer: LayerKv, keys: Tensor, values: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Token by token."""
    for i, (block, offset) in enumerate(zip(blocks.tolist(), offsets.tolist(), strict=True)):
        layer.keys[block, :, :, offset] = _storable(keys[i].to(layer.keys.dtype))
        layer.values[block, :, offset] = _storable(values[i].to(layer.values.dtype))


def kv_write(
    layer: LayerKv, keys: Tensor, values: Tensor, blocks: Tensor, offsets: Tensor, workspace: Workspace
) -> None:
    """Store keys and values, each [tokens, kv_heads, dim], at block and offset of each token, [tokens].

    float16 saturates at its largest finite value: an infinity would turn weights of zero into NaN.
    """
    staged = workspace.take("kv_write", tuple(keys.shape), layer.keys.dtype)
    layer.keys[blocks, :, :, offsets] = _storable(staged.copy_(keys))
    layer.values[blocks, :, offsets] = _storable(staged.copy_(values))


def kv_read_reference(layer: LayerKv, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [sequences, kv_heads, dim, tokens] and values [sequences, kv_heads, tokens, dim] of block tables
    [sequences, blocks]."""
    keys = [torch.cat(tuple(layer.keys[table].float()), dim=-1) for table in blocks]
    values = [torch.cat(tuple(layer.values[table].float()), dim=-2) for table in blocks]
    return torch.stack(keys), torch.stack(values)


def kv_read(layer: LayerKv, blocks: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """The same, in `workspace`: valid until the next call."""
    num_sequences, num_blocks = blocks.shape
    _, num_heads, block_size, dim = layer.values.shape
    keys = workspace.take("kv_read.keys", (num_sequences, num_heads, dim, num_blocks, block_size))
    values = workspace.take("kv_read.values", (num_sequences, num_heads, num_blocks, block_size, dim))
    # To float32 and into order in one pass.
    keys.copy_(_pick(layer.keys, blocks, workspace).permute(0, 2, 3, 1, 4))
    values.copy_(_pick(layer.values, blocks, workspace).permute(0, 2, 1, 3, 4))
    return keys.flatten(3), values.flatten(2, 3)


def _pick(parts: Tensor, blocks: Tensor, workspace: Workspace) -> Tensor:
    """[sequences, blocks, kv_heads, ...] of `parts`, [block, kv_heads, ...], in `workspace`: until the next call."""
    shape = (blocks.numel(), *parts.shape[1:])
    picked = workspace.take("kv_read.picked", shape, parts.dtype)
    torch.index_select(parts, 0, blocks.reshape(-1), out=picked)
    return picked.view(*blocks.shape, *parts.shape[1:])


def _storable(values: Tensor) -> Tensor:
    if values.dtype == torch.float16:
        limit = torch.finfo(torch.float16).max
        values.clamp_(-limit, limit)
    return values
