"""How much memory a worker's KV pool takes."""

from __future__ import annotations

import os

from libs.engine.kv.layout import KvLayout

MIB = 1024 * 1024
_DEFAULT_SHARE = 8  # of all memory
_DEFAULT_MIN_MIB, _DEFAULT_MAX_MIB = 64, 2048


def kv_blocks(layout: KvLayout, kv_cache_mib: int | None) -> int:
    """Blocks of a pool of `kv_cache_mib`, or of an eighth of this machine's memory (64 to 2048 MiB).

    Raises ValueError when not even four blocks fit.
    """
    if kv_cache_mib is None:
        memory_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB
        kv_cache_mib = min(max(memory_mib // _DEFAULT_SHARE, _DEFAULT_MIN_MIB), _DEFAULT_MAX_MIB)
    blocks = kv_cache_mib * MIB // layout.block_bytes
    if blocks < 4:
        raise ValueError(
            f"kv_cache_mib={kv_cache_mib} holds {blocks} blocks of {layout.block_bytes} bytes; four are the least"
        )
    return blocks
