"""Operations and bytes, counted by hand; memory as Linux tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.bench.figures import GEMM, READ, Figure
from libs.bench.memory import parse_smaps, resident
from libs.bench.shapes import FULL
from libs.bench.work import decode_bytes, prefill_operations, shares_of_machine, weight_bytes
from libs.checkpoint.open import open_checkpoint
from libs.engine.kv.layout import KvLayout
from libs.engine.kv.pool import KvPool
from tests.checkpoints import tiny_model, write_gguf, write_hf

SMAPS = """\
7f00-7f10 rw-s 00000000 00:01 5 /memfd:baton-kv (deleted)
Rss:                 400 kB
Pss:                 300 kB
Pss_Dirty:           300 kB
7f20-7f30 rw-p 00000000 00:00 0
Pss:                  50 kB
VmFlags: rd wr mr
7f40-7f50 r--p 00000000 08:01 9 /usr/lib/x.so
Pss:                   7 kB
"""


def test_operations_of_a_prompt() -> None:
    config = (
        tiny_model().config
    )  # hidden 64, 4 heads of 16, 2 kv heads, intermediate 128, 2 layers, 320 tokens
    per_layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128
    for num_tokens in (1, 5):
        keys_seen = sum(range(1, num_tokens + 1))
        expected = 2 * num_tokens * 2 * per_layer + 2 * 64 * 320 + 2 * 4 * 16 * 4 * keys_seen
        assert prefill_operations(config, num_tokens) == expected


def test_a_sliding_window_limits_the_keys() -> None:
    whole, windowed = tiny_model().config, tiny_model(sliding_window=2).config
    saved = prefill_operations(whole, 5) - prefill_operations(windowed, 5)
    assert saved == 2 * 4 * 16 * 4 * ((1 + 2 + 3 + 4 + 5) - (1 + 2 + 2 + 2 + 2))


@pytest.mark.parametrize("tied_head", [False, True])
@pytest.mark.parametrize("kind", ["gguf", "hf"])
def test_bytes_of_a_decode_step(tmp_path: Path, kind: str, tied_head: bool) -> None:
    model = tiny_model(tied_head=tied_head)
    path = tmp_path / ("model.gguf" if kind == "gguf" else "model")
    checkpoint = open_checkpoint(write_gguf(model, path) if kind == "gguf" else write_hf(model, path))
    stored = sum(weight.nbytes for weight in model.weights.values())  # float32 in both
    assert weight_bytes(checkpoint) == stored
    layout = KvLayout(2, 2, 16)
    unread = 0 if tied_head else 319 * 64 * 4  # an embedding that is not the head: one row of it
    assert decode_bytes(checkpoint, layout, 100) == stored - unread + 100 * 2 * 2 * 2 * 16 * 2


def test_shares_are_work_done_over_what_the_machine_can_do(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tiny_model(), tmp_path / "model.gguf"))
    layout = KvLayout(2, 2, 16)
    figures = {
        "prefill-1024": Figure("prefill-1024", "tok/s", (1024.0,)),  # a prompt a second
        "decode-1x32": Figure("decode-1x32", "tok/s", (10.0,)),
        "decode-16x128": Figure("decode-16x128", "tok/s", (10.0,)),
    }
    limits = {GEMM: Figure(GEMM, "GFLOP/s", (0.5, 1.0, 0.9)), READ: Figure(READ, "GB/s", (2.0, 1.0))}
    shares = shares_of_machine(checkpoint, layout, figures, limits)
    per_step = decode_bytes(checkpoint, layout, 32 + FULL.decode_steps // 2)
    assert list(shares) == ["prefill-1024", "decode-1x32"]
    prefill, decode = shares.values()
    assert prefill.least_ms == pytest.approx(1e3 * prefill_operations(checkpoint.config, 1024) / 1e9)
    assert (prefill.actual_ms, decode.actual_ms) == (1000, 100)
    assert decode.least_ms == pytest.approx(1e3 * per_step / 2e9)
    assert decode.value == decode.least_ms / 100
    assert shares_of_machine(checkpoint, layout, figures, {}) == {}


def test_smaps_are_summed_and_pools_told_apart() -> None:
    found = parse_smaps(SMAPS)
    assert (found.pss_bytes, found.kv_bytes, found.beside_kv_bytes) == (357 << 10, 300 << 10, 57 << 10)


def test_a_pool_counts_as_far_as_it_was_written() -> None:
    pool = KvPool(KvLayout(2, 2, 16), 1024)
    try:
        pool.blocks(0, 1024)[:] = bytes(pool.num_bytes)
        assert pool.num_bytes <= resident().kv_bytes <= resident().pss_bytes
    finally:
        pool.close()
