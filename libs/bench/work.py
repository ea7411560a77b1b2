"""What a step has to do at least: operations of a prompt, bytes of a decode step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from libs.bench.figures import GEMM, READ, Figure
from libs.bench.shapes import FULL, QUICK
from libs.checkpoint.checkpoint import Checkpoint
from libs.checkpoint.config import ModelConfig
from libs.checkpoint.gguf_types import SUPPORTED
from libs.checkpoint.raw import StoredType
from libs.engine.kv.layout import KvLayout

_EMBEDDING = "embed.weight"
_ELEMENTS = {element.name: element for element in SUPPORTED.values()}


def prefill_operations(config: ModelConfig, num_tokens: int) -> int:
    """Multiplications and additions of a prompt's matrices and attention; the head once, for the one token drawn.

    Attention counts the keys that a token sees, itself included: q.k and p.v, 2 * head_dim operations each.
    """
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (q + 2 * kv) + q * config.hidden_size
    layer += 3 * config.hidden_size * config.intermediate_size
    matrices = 2 * num_tokens * config.num_layers * layer
    head = 2 * config.hidden_size * config.vocab_size
    window = min(config.sliding_window or num_tokens, num_tokens)
    keys_seen = window * (window + 1) // 2 + (num_tokens - window) * window
    attention = 4 * config.num_layers * q * keys_seen
    return matrices + head + attention


def weight_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all weights as their files store them."""
    return sum(_sizes(checkpoint).values())


def decode_bytes(checkpoint: Checkpoint, layout: KvLayout, context: int) -> int:
    """Bytes that a decode step of one stream reads at least: weights as stored, and the KV of `context` tokens.

    An embedding that is not the head too counts with its one row.
    """
    sizes = _sizes(checkpoint)
    config = checkpoint.config
    weights = sum(sizes.values())
    if not config.tied_head:
        weights -= sizes[_EMBEDDING] * (config.vocab_size - 1) // config.vocab_size
    return weights + layout.token_bytes * min(config.sliding_window or context, context)


@dataclass(frozen=True, slots=True)
class Share:
    """Time of a prompt or a decode step: the least by one limit of the machine, and the measured median."""

    least_ms: float
    actual_ms: float

    @property
    def value(self) -> float:
        """1 is all that the limit allows; work that the limit does not measure (integers) may pass it."""
        return self.least_ms / self.actual_ms

    def to_json(self) -> dict[str, float]:
        return {"share": self.value, "least_ms": self.least_ms, "actual_ms": self.actual_ms}


def shares_of_machine(
    checkpoint: Checkpoint, layout: KvLayout, figures: Mapping[str, Figure], limits: Mapping[str, Figure]
) -> dict[str, Share]:
    """`prefill-N`: its operations at the product's rate; `decode-1xN`: a step's bytes at the rate of reading.

    Of a limit, the best that was seen. Decoding is timed over several steps; half of them count as context.
    """
    shares: dict[str, Share] = {}
    for shapes in (FULL, QUICK) if limits else ():
        for prefill in shapes.prefills:
            if prefill.key in figures:
                operations = prefill_operations(checkpoint.config, prefill.num_tokens)
                actual_ms = 1e3 * prefill.num_tokens / figures[prefill.key].median
                shares[prefill.key] = Share(operations / limits[GEMM].high / 1e6, actual_ms)
        for decode in shapes.decodes:
            if decode.key in figures:
                num_bytes = decode_bytes(checkpoint, layout, decode.context + shapes.decode_steps // 2)
                actual_ms = 1e3 / figures[decode.key].median
                shares[decode.key] = Share(num_bytes / limits[READ].high / 1e6, actual_ms)
    return shares


def _sizes(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes in the file of each weight, by canonical name."""
    return {name: _num_bytes(checkpoint.stored(name)) for name in checkpoint.tensor_names}


def _num_bytes(stored: StoredType) -> int:
    element = _ELEMENTS[stored.type_name]
    return math.prod(stored.shape) // element.block_size * element.block_bytes
