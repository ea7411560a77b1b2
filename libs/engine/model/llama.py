"""The Llama family (Llama, Mistral, Qwen2, Qwen3): a forward pass over a batch of rows, KV in the paged pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from libs.checkpoint.config import ModelConfig
from libs.checkpoint.rope import rope_frequencies
from libs.engine.model.batch import Batch
from libs.engine.model.weights import LayerWeights, Weights
from libs.engine.plan import StepAbandoned, never
from libs.kernels.activation import silu_mul
from libs.kernels.attention import paged_attention
from libs.kernels.attention_plan import AttentionGroup
from libs.kernels.kv import LayerKv, kv_write
from libs.kernels.matmul import Matmul
from libs.kernels.norm import rms_norm
from libs.kernels.rope import RopeTable, rope
from libs.kernels.workspace import Workspace


class Llama:
    """Holds weights and scratch memory, no state of any request. For one thread at a time."""

    def __init__(self, config: ModelConfig, weights: Weights, matmul: Matmul, max_tokens: int) -> None:
        """`max_tokens` bounds the positions that will ever be asked for."""
        self.config = config
        self._weights = weights
        self._matmul = matmul
        self._rope = RopeTable.build(rope_frequencies(config), min(max_tokens, config.context_length))
        self._workspace = Workspace()

    def forward(
        self, batch: Batch, kv: Sequence[LayerKv], is_abandoned: Callable[[], bool] = never
    ) -> Tensor:
        """Write the KV of the batch's tokens to `kv`, one a layer; logits of the drawn ones, [drawn, vocabulary].

        Raises StepAbandoned before the next layer.
        """
        weights, eps = self._weights, self.config.rms_norm_eps
        hidden = weights.embed[batch.tokens]
        angles = self._rope.at(batch.positions)
        for layer, layer_kv in zip(weights.layers, kv, strict=True):
            if is_abandoned():
                raise StepAbandoned
            hidden += self._attention(layer, rms_norm(hidden, layer.attn_norm, eps), batch, angles, layer_kv)
            hidden += self._mlp(layer, rms_norm(hidden, layer.mlp_norm, eps))
        drawn = rms_norm(hidden[batch.drawn], weights.norm, eps)
        return self._matmul.linear(drawn, weights.head)

    def _attention(
        self, layer: LayerWeights, x: Tensor, batch: Batch, angles: RopeTable, kv: LayerKv
    ) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        heads = self._matmul.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, self.config.head_dim)
        query_key, values = torch.split(heads, [num_heads + num_kv_heads, num_kv_heads], dim=1)
        query_key = self._normalise(layer, query_key)
        turned = torch.empty(query_key.shape)
        rope(query_key, angles, out=turned)
        query, keys = torch.split(turned, [num_heads, num_kv_heads], dim=1)
        kv_write(kv, keys, values, batch.blocks, batch.offsets, self._workspace)
        mixed = [
            paged_attention(part, kv, group, self._matmul, self._workspace)
            for part, group in _parts(query, batch)
        ]
        return self._matmul.linear(mixed[0] if len(mixed) == 1 else torch.cat(mixed), layer.o)

    def _normalise(self, layer: LayerWeights, query_key: Tensor) -> Tensor:
        """Qwen3 normalises each head of q and k."""
        if layer.q_norm is None or layer.k_norm is None:
            return query_key
        eps = self.config.rms_norm_eps
        query, keys = torch.split(query_key, [self.config.num_heads, self.config.num_kv_heads], dim=1)
        return torch.cat([rms_norm(query, layer.q_norm, eps), rms_norm(keys, layer.k_norm, eps)], dim=1)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        return self._matmul.linear(silu_mul(self._matmul.linear(x, layer.gate_up)), layer.down)


def _parts(query: Tensor, batch: Batch) -> Iterator[tuple[Tensor, AttentionGroup]]:
    sizes = [group.num_sequences * group.num_rows for group in batch.groups]
    return zip(torch.split(query, sizes), batch.groups, strict=True)
