"""The sampler: greedy, filtered and seeded draws, penalties, log-probabilities."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from libs.engine import sampler
from libs.engine.plan import Draw
from libs.engine.sampler import LogitsError, sample, uniform
from libs.wire.messages import Sampling

Floats = NDArray[np.float32]


def draw(history: list[int] | None = None, num_prompt_tokens: int = 0, **options: Any) -> Draw:
    return Draw(Sampling(**options), history or [], num_prompt_tokens)


def rows_of(*rows: list[float]) -> Floats:
    return np.array(rows, np.float32)


def random_rows(count: int, size: int, seed: int) -> Floats:
    return np.random.default_rng(seed).standard_normal((count, size), np.float32)


def logits_of(*probabilities: float) -> Floats:
    return np.log(np.array([probabilities], np.float32))


def drawn(logits: Floats, num_draws: int = 2000, **options: Any) -> list[int]:
    """How often each token is drawn, over seeds 0, 1, ..."""
    draws = [draw(seed=seed, **options) for seed in range(num_draws)]
    tokens = sample(np.broadcast_to(logits, (num_draws, logits.shape[1])), draws)
    return np.bincount([token.id for token in tokens], minlength=logits.shape[1]).tolist()


def support(logits: Floats, **options: Any) -> set[int]:
    return {i for i, count in enumerate(drawn(logits, 500, **options)) if count}


# ---------------------------------------------------------------- greedy


def test_greedy_takes_the_best_and_the_first_of_equals() -> None:
    logits = rows_of([1.0, 3.0, 3.0, 2.0], [0.0, -1.0, -2.0, 0.0], [-5.0, -6.0, -7.0, -4.0])
    assert [token.id for token in sample(logits, [draw(temperature=0.0)] * 3)] == [1, 0, 3]


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-4, 1e-3])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = rows_of([100.0, 101.0, -1000.0, 100.9])
    assert support(logits, temperature=temperature) == {1}


def test_no_rows() -> None:
    assert sample(np.empty((0, 10), np.float32), []) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(bad: float, temperature: float) -> None:
    logits = np.zeros((2, 8), np.float32)
    logits[1, 5] = bad
    with pytest.raises(LogitsError, match="token 5 at position 3"):
        sample(logits, [draw([1, 2, 3], 3, temperature=temperature)] * 2)
    with pytest.raises(LogitsError):
        sample(np.full((1, 8), -np.inf, np.float32), [draw(temperature=temperature)])


def test_minus_infinity_is_never_drawn() -> None:
    assert support(rows_of([0.0, -math.inf, 0.0, -math.inf]), temperature=5.0) == {0, 2}


# ---------------------------------------------------------------- the generator


def test_uniform_is_the_same_everywhere() -> None:
    golden = {
        (0, 0): "0x1.7a5d3204726c0p-7",
        (0, 1): "0x1.0137e64510730p-1",
        (7, 100): "0x1.a8567874fb8acp-3",
        (2**64 - 1, 8191): "0x1.1b174900a918ap-2",
    }
    assert {key: uniform(*key).hex() for key in golden} == golden


def test_uniform_is_uniform_over_seeds_and_over_positions() -> None:
    for numbers in ([uniform(s, 5) for s in range(4000)], [uniform(5, p) for p in range(4000)]):
        assert len(set(numbers)) == len(numbers)
        assert all(0 <= number < 1 for number in numbers)
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert abs(counts - 200).max() < 5 * math.sqrt(200)


def test_a_draw_depends_on_its_row_seed_and_position_alone() -> None:
    rng = random.Random(0)
    logits = random_rows(17, 3000, seed=0) * 3
    options: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 40},
        {"min_p": 0.02},
        {"temperature": 0.0, "logprobs": 3},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 0.0},
    ]
    draws = [
        draw([rng.randrange(3000) for _ in range(rng.randint(2, 50))], 1, seed=i, **options[i % len(options)])
        for i in range(17)
    ]
    together = sample(logits, draws)
    assert [sample(logits[i : i + 1], draws[i : i + 1])[0] for i in range(17)] == together
    order = list(range(17))
    rng.shuffle(order)
    assert sample(logits[order], [draws[i] for i in order]) == [together[i] for i in order]


def test_seed_and_position_change_the_draw() -> None:
    logits = np.zeros((1, 1000), np.float32)
    by_seed = [sample(logits, [draw([1], 1, seed=seed)])[0].id for seed in range(20)]
    by_position = [sample(logits, [draw([1] * n, 1, seed=3)])[0].id for n in range(1, 21)]
    assert len(set(by_seed)) > 15
    assert len(set(by_position)) > 15


# ---------------------------------------------------------------- distributions


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_temperature(temperature: float) -> None:
    probabilities = np.array([0.1, 0.4, 0.2, 0.3])
    expected = probabilities ** (1 / temperature)
    expected /= expected.sum()
    counts = np.array(drawn(logits_of(*probabilities), 4000, temperature=temperature))
    assert (abs(counts - 4000 * expected) < 5 * np.sqrt(4000 * expected)).all()


def test_top_k() -> None:
    logits = logits_of(0.1, 0.4, 0.2, 0.3)
    assert support(logits, top_k=1) == {1}
    assert support(logits, top_k=3) == {1, 2, 3}
    assert support(logits, top_k=100) == {0, 1, 2, 3}
    assert support(rows_of([1.0, 5.0, 5.0, 5.0, 5.0]), top_k=2) == {1, 2}  # ties: by id


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = logits_of(0.05, 0.5, 0.15, 0.3)
    assert support(logits, top_p=0.01) == {1}
    assert support(logits, top_p=0.49) == {1}
    assert support(logits, top_p=0.51) == {1, 3}
    assert support(logits, top_p=0.9) == {1, 2, 3}
    assert support(logits, top_p=1.0) == {0, 1, 2, 3}


def test_top_p_counts_what_top_k_left() -> None:
    logits = logits_of(0.4, 0.3, 0.2, 0.1)
    assert support(logits, top_p=0.5) == {0, 1}
    assert support(logits, top_p=0.5, top_k=2) == {0}  # 0.4 of 0.7


def test_min_p_is_relative_to_the_best() -> None:
    logits = logits_of(0.5, 0.3, 0.15, 0.05)
    assert support(logits, min_p=0.2) == {0, 1, 2}
    assert support(logits, min_p=0.5) == {0, 1}
    assert support(logits, min_p=1.0) == {0}


def test_kept_tokens_keep_their_proportions() -> None:
    counts = np.array(drawn(logits_of(0.4, 0.3, 0.2, 0.1), 4000, top_k=2))
    expected = 4000 * np.array([4, 3, 0, 0]) / 7
    assert (abs(counts - expected) <= 5 * np.sqrt(expected)).all()


@pytest.mark.parametrize("head", [1, 7, 64])
def test_ranking_a_part_first_changes_nothing(monkeypatch: pytest.MonkeyPatch, head: int) -> None:
    flat_and_peaked = random_rows(40, 500, seed=1) * np.linspace(0.01, 6, 40, dtype=np.float32)[:, None]
    options: list[dict[str, Any]] = [
        {},
        {"top_p": 0.3},
        {"top_p": 0.99},
        {"min_p": 0.01},
        {"top_p": 0.7, "min_p": 0.1},
        {"top_k": 20},
    ]
    for chosen in options:
        draws = [draw([0] * i, 0, seed=i, **chosen) for i in range(40)]
        monkeypatch.setattr(sampler, "_HEAD", 500)
        expected = sample(flat_and_peaked, draws)
        monkeypatch.setattr(sampler, "_HEAD", head)
        assert sample(flat_and_peaked, draws) == expected


# ---------------------------------------------------------------- penalties


def penalised(
    logits: list[float], history: list[int], num_prompt_tokens: int, **options: float
) -> list[float]:
    """By the definitions, one token at a time."""
    result = list(logits)
    answer = history[num_prompt_tokens:]
    for i in range(len(result)):
        if i in history:
            penalty = options.get("repetition_penalty", 1.0)
            result[i] = result[i] / penalty if result[i] > 0 else result[i] * penalty
        result[i] -= options.get("frequency_penalty", 0.0) * answer.count(i)
        result[i] -= options.get("presence_penalty", 0.0) * (i in answer)
    return result


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.5},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -0.7},
        {"presence_penalty": 1.1},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.4},
    ],
    ids=str,
)
def test_penalties(options: dict[str, float]) -> None:
    """The order of all tokens: greedy after greedy, each best one struck out."""
    rng = random.Random(5)
    history = [rng.randrange(12) for _ in range(15)]
    logits = [rng.uniform(-2, 2) for _ in range(12)]
    expected = penalised(logits, history, 6, **options)
    assert expected != penalised(logits, history, 6)
    ranking = sorted(range(12), key=lambda i: -expected[i])
    rows = rows_of(*[logits] * 12)
    for i in range(12):
        rows[i, ranking[:i]] = -math.inf
    tokens = sample(rows, [draw(history, 6, temperature=0.0, **options)] * 12)
    assert [token.id for token in tokens] == ranking


def test_prompt_tokens_count_for_repetition_alone() -> None:
    logits = rows_of([1.0, 0.9])
    assert sample(logits, [draw([0], 1, temperature=0.0, repetition_penalty=2.0)])[0].id == 1
    assert sample(logits, [draw([0], 1, temperature=0.0, frequency_penalty=2.0)])[0].id == 0
    assert sample(logits, [draw([0], 1, temperature=0.0, presence_penalty=2.0)])[0].id == 0


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 0.3, "top_k": 5}, {"repetition_penalty": 3.0}], ids=str
)
def test_logprobs_are_those_of_the_raw_logits(options: dict[str, Any]) -> None:
    logits = random_rows(8, 2000, seed=2) * 4
    exact = logits.astype(np.float64)
    expected = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    for i, token in enumerate(sample(logits, [draw([3, 4], 1, logprobs=4, **options)] * 8)):
        assert token.logprob == pytest.approx(float(expected[i, token.id]), abs=1e-5)
        best = np.argsort(-expected[i])[:4]
        assert [id for id, _ in token.top] == best.tolist()
        assert [value for _, value in token.top] == pytest.approx(expected[i, best].tolist(), abs=1e-5)


def test_how_many_logprobs() -> None:
    logits = rows_of([2.0, 1.0, 1.0])
    for asked, ids in ((0, []), (2, [0, 1]), (3, [0, 1, 2]), (20, [0, 1, 2])):
        (token,) = sample(logits, [draw(temperature=0.0, logprobs=asked)])
        assert token.logprob is not None
        assert [id for id, _ in token.top] == ids
    (token,) = sample(logits, [draw(temperature=0.0)])
    assert token.logprob is None and token.top == ()
