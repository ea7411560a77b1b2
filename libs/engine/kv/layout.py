"""Layout of a KV pool: `[block][layer][k, v][kv_head][token][dim]`, each block one contiguous run of bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

KvDtype = Literal["f16", "f32"]
LAYOUT_VERSION = 1
_BYTES: dict[KvDtype, int] = {"f16": 2, "f32": 4}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and element type of one block. `block_size` is in tokens."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: KvDtype = "f16"

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[layer, k or v, kv_head, token, dim]"""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def token_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * _BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    @property
    def fingerprint(self) -> str:
        """What two pools must share before bytes may move between them."""
        text = f"{LAYOUT_VERSION}:{self.block_shape}:{self.dtype}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)
