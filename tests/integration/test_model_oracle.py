"""Logits against `transformers`, which loads the same files and computes in float32."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from libs.checkpoint.config import RopeScaling
from libs.checkpoint.open import open_checkpoint, resolve_model
from libs.engine.kv.pool import KvPool
from libs.engine.model.packed import open_packed
from libs.engine.native_runner import NativeRunner
from libs.kernels.cases import relative_error
from libs.kernels.native.kernels import Kernels
from libs.text.model import TextModel
from tests.checkpoints import tiny_model, write_hf
from tests.integration.model_steps import Bench, MakeRunner, native_runner, random_tokens, torch_runner
from tests.native import CACHE_DIR, library
from tests.reference import embedded_reference, load_reference

MakeBench = Callable[..., Bench]

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at a temperature of",
    "Q: What is the largest planet of the solar system?\nA:",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    "La capitale de l'Allemagne est",
    "SELECT name, age FROM users WHERE",
    "To make bread you need flour, water,",
    "In 1969 the first human being",
    "<html>\n<head>\n<title>",
    "My favourite season is autumn because",
    "import numpy as np\n\nx = np.",
    "Roses are red, violets are",
    "The theory of evolution was",
    "Emoji: \U0001f600 and umlauts: äöü, 東京",
    "a",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of "
    "foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light",
)
NUM_GENERATED = 64

TINY = {
    "llama": tiny_model("llama"),
    "llama, tied": tiny_model("llama", tied_head=True, seed=1),
    "llama, one kv head for each head": tiny_model("llama", num_kv_heads=4, seed=2),
    "llama3 rope": tiny_model("llama", rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64), seed=3),
    "linear rope": tiny_model("llama", rope_scaling=RopeScaling("linear", 4.0), seed=4),
    "mistral": tiny_model("mistral", seed=5),
    "mistral, window": tiny_model("mistral", sliding_window=40, seed=6),
    "qwen2": tiny_model("qwen2", seed=7),
    "qwen2, tied": tiny_model("qwen2", tied_head=True, seed=8),
    "qwen3": tiny_model("qwen3", seed=9),
    "qwen3, tied": tiny_model("qwen3", tied_head=True, seed=10),
}


def reference_logits(model: Any, tokens: list[int]) -> Tensor:
    """[tokens, vocabulary]"""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("make_runner", [torch_runner, native_runner], ids=["torch", "native"])
@pytest.mark.parametrize("name", list(TINY))
def test_tiny_model(tmp_path: Path, make_bench: MakeBench, make_runner: MakeRunner, name: str) -> None:
    """Random weights, all of them float32: every position of 300 tokens, computed in chunks."""
    folder = write_hf(TINY[name], tmp_path / "tiny")
    bench = make_bench(open_checkpoint(folder), 160, dtype="f32", make_runner=make_runner)
    tokens = random_tokens(random.Random(name), 300, 320)
    expected = reference_logits(load_reference(folder), tokens)
    for length in (1, 2, 16, 41, 100, 257, 300):
        actual = bench.run(bench.feed(tokens[:length]), [length - length // 3, length])
        assert relative_error(actual, expected[length - 1]) < 1e-4, f"{length} tokens"


@pytest.mark.model
def test_real_model_answers_as_transformers_does(make_bench: MakeBench) -> None:
    """20 prompts, 64 greedy tokens each, in one batch; the oracle sees each whole text once."""
    checkpoint = open_checkpoint(resolve_model("smollm2"))
    text_model = TextModel.from_checkpoint(checkpoint)
    prompts = [text_model.encode_completion(text) for text in PROMPTS]
    bench = make_bench(checkpoint, 220, dtype="f32")
    answers = greedy(bench, prompts, NUM_GENERATED)
    num_clear = 0
    for text, prompt, answer in zip(PROMPTS, prompts, answers, strict=True):
        tokens = [int(logits.argmax()) for logits in answer]
        expected = reference_logits(embedded_reference(), [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        best = expected.topk(2)
        for position, logits in enumerate(answer):
            where = f"{text!r}, answer token {position}"
            assert relative_error(logits, expected[position]) < 1e-3, where
            if best.values[position, 0] - best.values[position, 1] > 0.02:
                num_clear += 1
                assert tokens[position] == best.indices[position, 0], where
    assert num_clear > 0.9 * len(PROMPTS) * NUM_GENERATED


def greedy(bench: Bench, prompts: list[list[int]], count: int) -> list[list[Tensor]]:
    """The logits of `count` greedy tokens of each prompt; all prompts advance together."""
    feeds = [bench.feed([*prompt, *[0] * count]) for prompt in prompts]
    blocks = [feed.blocks for feed in feeds]
    answers: list[list[Tensor]] = [[] for _ in prompts]
    for feed, prompt in zip(feeds, prompts, strict=True):
        feed.tokens = list(prompt)
    for _ in range(count):
        results = bench.step(*((feed, feed.left) for feed in feeds))
        for feed, answer, logits in zip(feeds, answers, results, strict=True):
            assert logits is not None
            answer.append(logits)
            feed.tokens.append(int(logits.argmax()))
    assert blocks == [feed.blocks for feed in feeds]
    return answers


@pytest.mark.model
def test_half_precision_kv_stays_close(make_bench: MakeBench) -> None:
    checkpoint = open_checkpoint(resolve_model("smollm2"))
    tokens = TextModel.from_checkpoint(checkpoint).encode_completion(PROMPTS[-1])
    bench = make_bench(checkpoint, 10, dtype="f16")
    actual = bench.run(bench.feed(tokens), [len(tokens)])
    assert relative_error(actual, reference_logits(embedded_reference(), tokens)[-1]) < 5e-3


@pytest.mark.model
def test_quantised_products_stay_close(make_bench: MakeBench) -> None:
    """The native engine rounds activations to 8 bits: mean divergence from float32 over 20 texts, in nats.

    llama.cpp, which rounds them too, is at 0.003 on the same file.
    """
    checkpoint = open_checkpoint(resolve_model("smollm2"))
    text_model = TextModel.from_checkpoint(checkpoint)

    def make(_: object, pool: KvPool) -> NativeRunner:
        return NativeRunner(open_packed(checkpoint, CACHE_DIR), pool, Kernels(library(), 2))

    bench = make_bench(checkpoint, 40, make_runner=make)
    divergences = []
    for text in PROMPTS:
        tokens = text_model.encode_completion(text)
        expected = reference_logits(embedded_reference(), tokens)[-1].log_softmax(-1)
        actual = bench.run(bench.feed(tokens), [len(tokens)]).log_softmax(-1)
        divergences.append(float((expected.exp() * (expected - actual)).sum()))
    assert 0 < sum(divergences) / len(divergences) < 0.006
