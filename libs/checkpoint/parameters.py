"""The weights of a model: canonical names, the names that GGUF and Hugging Face files use, and shapes.

Shapes are numpy's, [out, in] for matrices. A GGUF file stores the same bytes with its dimensions reversed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from libs.checkpoint.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight. `rope_heads` is set where rotary pairs of that many heads lie along the rows."""

    name: str
    gguf_name: str
    hf_name: str
    shape: tuple[int, ...]
    rope_heads: int | None = None


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """Every weight that a model of this shape has, in the order of its use."""
    hidden, vocab = config.hidden_size, config.vocab_size
    yield Parameter("embed.weight", "token_embd.weight", "model.embed_tokens.weight", (vocab, hidden))
    for layer in range(config.num_layers):
        yield from _layer(config, layer)
    yield Parameter("norm.weight", "output_norm.weight", "model.norm.weight", (hidden,))
    if not config.tied_head:
        yield Parameter("head.weight", "output.weight", "lm_head.weight", (vocab, hidden))


def _layer(config: ModelConfig, layer: int) -> Iterator[Parameter]:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim

    def make(
        name: str, gguf_name: str, hf_name: str, shape: tuple[int, ...], rope_heads: int | None = None
    ) -> Parameter:
        return Parameter(
            f"layers.{layer}.{name}",
            f"blk.{layer}.{gguf_name}",
            f"model.layers.{layer}.{hf_name}",
            shape,
            rope_heads,
        )

    yield make("attn_norm.weight", "attn_norm.weight", "input_layernorm.weight", (hidden,))
    for part, rows, rope_heads in (
        ("q", q_rows, config.num_heads),
        ("k", kv_rows, config.num_kv_heads),
        ("v", kv_rows, None),
    ):
        names = (f"{part}.weight", f"attn_{part}.weight", f"self_attn.{part}_proj.weight")
        yield make(*names, (rows, hidden), rope_heads)
        if config.qkv_bias:
            names = (f"{part}.bias", f"attn_{part}.bias", f"self_attn.{part}_proj.bias")
            yield make(*names, (rows,), rope_heads)
    if config.qk_norm:
        for part in ("q", "k"):
            yield make(
                f"{part}_norm.weight", f"attn_{part}_norm.weight", f"self_attn.{part}_norm.weight", (dim,)
            )
    yield make("o.weight", "attn_output.weight", "self_attn.o_proj.weight", (hidden, q_rows))
    yield make("mlp_norm.weight", "ffn_norm.weight", "post_attention_layernorm.weight", (hidden,))
    yield make("gate.weight", "ffn_gate.weight", "mlp.gate_proj.weight", (inner, hidden))
    yield make("up.weight", "ffn_up.weight", "mlp.up_proj.weight", (inner, hidden))
    yield make("down.weight", "ffn_down.weight", "mlp.down_proj.weight", (hidden, inner))
