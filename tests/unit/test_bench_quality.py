"""Texts, the file of reference log-probabilities, and divergence from it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.peers.kl_base import Base, num_compared, write_base
from bench.peers.quality import Divergence, divergences, parse_perplexity
from bench.peers.texts import choose, strings
from libs.engine.plan import StepPlan
from libs.wire.errors import BatonError

VOCAB, TOKENS = 11, 8
TEXTS = [[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]]


def logits_of(text: int, position: int) -> np.ndarray:
    return np.random.default_rng((text, position)).normal(0, 3, VOCAB).astype(np.float32)


def reference() -> Iterator[np.ndarray]:
    for text in range(len(TEXTS)):
        yield np.stack([logits_of(text, position) for position in range(TOKENS // 2, TOKENS - 1)])


@pytest.fixture
def base(tmp_path: Path) -> Base:
    write_base(tmp_path / "base", TEXTS, reference())
    return Base(tmp_path / "base")


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (p.astype(float), q.astype(float)))
    return float((p * np.log(p / q)).sum())


def test_the_file_is_as_llama_perplexity_reads_it(tmp_path: Path, base: Base) -> None:
    raw = (tmp_path / "base").read_bytes()
    assert raw[:8] == b"_logits_"
    assert np.frombuffer(raw[8:20], "<i4").tolist() == [TOKENS, VOCAB, len(TEXTS)]
    assert np.frombuffer(raw[20 : 20 + 4 * 16], "<i4").tolist() == [*TEXTS[0], *TEXTS[1]]
    row_bytes = 2 * (12 + 4)  # scale and least, then the vocabulary, made even
    assert len(raw) == 20 + 4 * 16 + len(TEXTS) * num_compared(TOKENS) * row_bytes
    scale, least = np.frombuffer(raw[84:92], "<f4")
    log_p = scale * np.frombuffer(raw[92 : 92 + 2 * VOCAB], "<u2") + least
    assert np.exp(log_p).sum() == pytest.approx(1, abs=1e-3)
    assert log_p.argmax() == logits_of(0, TOKENS // 2).argmax()


def test_divergence_is_that_of_the_two_distributions(base: Base) -> None:
    for text in range(2):
        for position in range(4, 7):
            expected = logits_of(text, position)
            other = expected + np.random.default_rng(text).normal(0, 1, VOCAB).astype(np.float32)
            found = base.divergence(text, position, other)
            assert found == pytest.approx(divergence(expected, other), abs=2e-3)
            assert base.divergence(text, position, expected) == pytest.approx(0, abs=2e-4)
            assert base.divergence(text, position, other + 5) == pytest.approx(found, abs=1e-5)


def test_what_the_reference_deems_impossible_does_not_count(tmp_path: Path) -> None:
    expected = np.zeros((1, 4), np.float32)
    expected[0, 3] = -40
    write_base(tmp_path / "base", [[0, 0, 0, 0]], iter([expected]))
    assert Base(tmp_path / "base").divergence(0, 2, np.zeros(4, np.float32)) == pytest.approx(
        np.log(4 / 3), abs=1e-3
    )


def test_rows_are_drawn_where_the_base_compares(base: Base) -> None:
    plans: list[StepPlan] = []

    def logits(plan: StepPlan) -> np.ndarray:
        plans.append(plan)
        return np.stack([logits_of(int(row.request_id[-1]), row.end - 1) for row in plan.rows])

    found = list(divergences(logits, base, [0, 1], blocks_per_text=1))
    assert found == pytest.approx([0] * 6, abs=2e-4)
    assert [[(row.start, row.tokens) for row in plan.rows] for plan in plans] == [
        [(0, (1, 2, 3, 4, 5)), (0, (8, 7, 6, 5, 4))],
        [(5, (6,)), (5, (3,))],
        [(6, (7,)), (6, (2,))],
    ]
    assert all([row.blocks for row in plan.rows] == [(0,), (1,)] for plan in plans)


def test_a_file_that_is_no_base(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"GGUF....")
    with pytest.raises(BatonError, match="no log-probabilities"):
        Base(tmp_path / "x")
    with pytest.raises(ValueError, match="logits of text 0"):
        write_base(tmp_path / "y", TEXTS, iter([np.zeros((2, VOCAB), np.float32)]))


def test_llama_perplexity() -> None:
    text = "====== KL divergence statistics ======\nMean    KLD:   0.002844 ±   0.000159\nMaximum KLD: 0.1\n"
    assert parse_perplexity(text) == Divergence(0.002844, 0.000159)
    with pytest.raises(BatonError, match="no mean"):
        parse_perplexity("kl_divergence: failed reading")


def test_texts_come_from_all_files_in_turn(tmp_path: Path) -> None:
    long = "a" * 90
    (tmp_path / "a.txt").write_text("x" * 240)
    lines = [
        json.dumps({"id": 1, "turns": [long, "short"]}),
        "not json",
        json.dumps({"deep": {"text": "b" * 90}}),
    ]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (tmp_path / "LICENSE").write_text("l" * 500)

    def encode(text: str) -> list[int]:
        return [ord(character) for character in text]

    chosen = choose(tmp_path, 4, 10, encode)
    assert chosen == [[ord("x")] * 10, [ord("a")] * 10, [ord("x")] * 10, [ord("a")] * 10]
    with pytest.raises(BatonError, match="5 texts of 10 tokens; 50 are needed"):
        choose(tmp_path, 50, 10, encode)


def test_texts_that_cannot_be_written_in_tokens_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 80 + "y" * 80)

    def encode(text: str) -> list[int]:
        if text.startswith("x"):
            raise BatonError("no token for x")
        return list(text.encode())

    assert choose(tmp_path, 1, 10, encode) == [[ord("y")] * 10]


def test_only_long_strings_are_texts() -> None:
    assert list(strings({"a": ["x" * 40, "y" * 39, 3, None], "b": {"c": "z" * 41}})) == ["x" * 40, "z" * 41]
