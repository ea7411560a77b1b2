"""KV of tokens into the pool, and tiles of blocks out of it.

A pool is one tensor, [block, layer, k or v, kv_head, token, dim] in float16 or float32; `pool[:, layer]` is what
these functions take.
"""

from __future__ import annotations

import torch
from torch import Tensor

from libs.kernels.workspace import Workspace


def kv_write_reference(
    pool_layer: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, offsets: Tensor
) -> None:
    """Token by token."""
    for i, (block, offset) in enumerate(zip(blocks.tolist(), offsets.tolist(), strict=True)):
        pool_layer[block, 0, :, offset] = _storable(keys[i].to(pool_layer.dtype))
        pool_layer[block, 1, :, offset] = _storable(values[i].to(pool_layer.dtype))


def kv_write(
    pool_layer: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, offsets: Tensor, workspace: Workspace
) -> None:
    """Store keys and values, each [tokens, kv_heads, dim], at block and offset of each token, [tokens].

    float16 saturates at its largest finite value: an infinity would turn weights of zero into NaN.
    """
    shape = (keys.shape[0], 2, *keys.shape[1:])
    staged = workspace.take("kv_write", shape, pool_layer.dtype)
    staged[:, 0].copy_(keys)
    staged[:, 1].copy_(values)
    pool_layer[blocks, :, :, offsets] = _storable(staged)


def kv_read_reference(pool_layer: Tensor, blocks: Tensor) -> Tensor:
    """Keys and values of block tables [sequences, blocks], each [sequences, kv_heads, tokens, dim]."""
    return pool_layer[blocks].float().permute(2, 0, 3, 1, 4, 5).flatten(3, 4)


def kv_read(pool_layer: Tensor, blocks: Tensor, workspace: Workspace) -> Tensor:
    """The same as one tensor, [2, sequences, kv_heads, tokens, dim], in `workspace`: valid until the next call."""
    num_sequences, num_blocks = blocks.shape
    _, _, num_heads, block_size, dim = pool_layer.shape
    shape = (num_sequences, num_blocks, 2, num_heads, block_size, dim)
    picked = workspace.take("kv_read.picked", shape, pool_layer.dtype)
    torch.index_select(pool_layer, 0, blocks.reshape(-1), out=picked.view(-1, *shape[2:]))
    kv = workspace.take("kv_read", (2, num_sequences, num_heads, num_blocks, block_size, dim))
    kv.copy_(picked.permute(2, 0, 3, 1, 4, 5))  # to float32 and into order in one pass
    return kv.view(2, num_sequences, num_heads, num_blocks * block_size, dim)


def _storable(values: Tensor) -> Tensor:
    if values.dtype == torch.float16:
        limit = torch.finfo(torch.float16).max
        values.clamp_(-limit, limit)
    return values
