"""Layout of a KV pool: each block one contiguous run of bytes, the same in every pool, tier and peer.

    [block][layer][k, v][kv_head][part]    a part holds the K, or the V, of one block and head:
        K: [dim][token]                    transposed: what a score adds up lies side by side for all keys of a block
        V: [token][dim]

So kernels read scores and mixed values with whole registers and transpose nothing. Elements are little endian.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

KvDtype = Literal["f16", "f32"]
LAYOUT_VERSION = 2
_BYTES: dict[KvDtype, int] = {"f16": 2, "f32": 4}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape, element type and origin of one block. `block_size` is in tokens."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: KvDtype = "f16"
    numerics: str = ""  # of the engine that fills it: others would compute other bits under the same names

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """[layer, k or v, kv_head, elements of a part]; the order in a part differs, see the module."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size * self.head_dim)

    @property
    def token_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * _BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    @property
    def fingerprint(self) -> str:
        """What two pools must share before bytes may move between them."""
        shape = (self.num_layers, self.num_kv_heads, self.head_dim, self.block_size)
        text = f"{LAYOUT_VERSION}:{shape}:{self.dtype}:{self.numerics}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)
