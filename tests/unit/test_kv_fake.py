"""FakeRunner: its answer depends on every byte of KV that a model would read, and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from libs.engine.fake import FakeModel, FakeRunner, fake_continuation
from libs.engine.kv.layout import KvLayout
from libs.engine.kv.pool import KvPool
from libs.engine.plan import Draw, Row, StepPlan
from libs.wire.messages import Sampling, Token

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
BLOCKS = (3, 0, 5)


@pytest.fixture(
    params=[KvLayout(1, 1, 2, 4, "f32"), KvLayout(3, 2, 8, 4, "f16")], ids=["tiny", "3 layers f16"]
)
def pool(request: pytest.FixtureRequest) -> Iterator[KvPool]:
    pool = KvPool(request.param, 6)
    yield pool
    pool.close()


def plan(
    tokens: list[int], start: int, sampling: Sampling | None = None, blocks: tuple[int, ...] = BLOCKS
) -> StepPlan:
    draw = Draw(sampling or Sampling(), tokens, len(PROMPT))
    return StepPlan((Row("r", tuple(tokens[start:]), start, blocks, draw),))


def draw(runner: FakeRunner, step: StepPlan) -> Token:
    (token,) = runner.execute(step)
    assert token is not None
    return token


def test_the_oracle_agrees_however_the_prompt_is_cut(pool: KvPool) -> None:
    runner = FakeRunner(pool)
    want = fake_continuation(PROMPT, 1)[0]
    assert draw(runner, plan(PROMPT, 0)).id == want
    assert draw(runner, plan(PROMPT, 4)).id == want  # the rest is read back
    assert draw(runner, plan(PROMPT, 8)).id == want
    first_part = StepPlan((Row("r", (5, 6, 7), 0, (1, 2, 4), None),))
    assert runner.execute(first_part) == (None,)
    assert draw(runner, plan(PROMPT, 3, blocks=(1, 2, 4))).id == want


def test_any_damage_to_what_is_read_changes_the_answer(pool: KvPool) -> None:
    runner = FakeRunner(pool)
    want = draw(runner, plan(PROMPT, 0)).id
    for block in BLOCKS[:2]:
        whole = bytes(pool.blocks(block, 1))
        half = len(whole) // 2
        for damaged in (
            bytes(len(whole)),
            whole[:half] + bytes(half),
            bytes(half) + whole[half:],
            bytes(pool.blocks(5, 1)),
        ):
            pool.blocks(block, 1)[:] = damaged
            assert draw(runner, plan(PROMPT, 8)).id != want
        pool.blocks(block, 1)[:] = whole
        assert draw(runner, plan(PROMPT, 8)).id == want
    assert draw(runner, plan(PROMPT, 8, blocks=(0, 3, 5))).id != want


def test_bytes_of_other_places_do_not_matter(pool: KvPool) -> None:
    runner = FakeRunner(pool)
    for block in range(6):
        pool.blocks(block, 1)[:] = b"\xff" * pool.layout.block_bytes
    assert draw(runner, plan(PROMPT, 0)).id == fake_continuation(PROMPT, 1)[0]


def test_seeds_matter_only_when_sampling() -> None:
    greedy = [fake_continuation(PROMPT, 8, sampling=Sampling(temperature=0.0, seed=seed)) for seed in (1, 2)]
    drawn = [fake_continuation(PROMPT, 8, sampling=Sampling(seed=seed)) for seed in (1, 1, 2)]
    assert greedy[0] == greedy[1]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_script_is_followed_then_the_hash(pool: KvPool) -> None:
    model = FakeModel(script={tuple(PROMPT): [41, 42]})
    runner = FakeRunner(pool, model)
    tokens = list(PROMPT)
    for want in fake_continuation(PROMPT, 3, model):
        assert draw(runner, plan(tokens, max(0, len(tokens) - 1) if tokens != PROMPT else 0)).id == want
        tokens.append(want)
    assert tokens[len(PROMPT) : -1] == [41, 42]


def test_a_script_does_not_hide_damage(pool: KvPool) -> None:
    runner = FakeRunner(pool, FakeModel(vocab_size=1000, script={tuple(PROMPT): [5000]}))
    assert draw(runner, plan(PROMPT, 0)).id == 5000
    half = pool.layout.block_bytes // 2
    pool.blocks(BLOCKS[0], 1)[half:] = bytes(half)
    assert draw(runner, plan(PROMPT, 8)).id < 1000


def test_avoided_ids_are_never_drawn() -> None:
    model = FakeModel(vocab_size=4, avoid=frozenset({0, 1, 3}))
    assert fake_continuation(PROMPT, 20, model) == [2] * 20


def test_logprobs_come_only_when_asked_for() -> None:
    model = FakeModel()
    assert model.draw(b"x", PROMPT, 9, Sampling()).logprob is None
    chosen = model.draw(b"x", PROMPT, 9, Sampling(logprobs=0))
    assert (chosen.logprob is not None, chosen.top) == (True, ())
    best = model.draw(b"x", PROMPT, 9, Sampling(logprobs=3))
    assert best.top[0] == (best.id, best.logprob)
    assert len({token_id for token_id, _ in best.top}) == 3
    assert [p for _, p in best.top] == sorted((p for _, p in best.top), reverse=True)


def test_failures_are_injected_before_anything_is_written(pool: KvPool) -> None:
    def fail(step: StepPlan) -> None:
        raise RuntimeError("injected")

    runner = FakeRunner(pool, before_step=fail)
    with pytest.raises(RuntimeError, match="injected"):
        runner.execute(plan(PROMPT, 0))
    assert not any(pool.view)


def test_a_layout_without_room_for_a_mark_is_refused() -> None:
    pool = KvPool(KvLayout(1, 1, 2, 4, "f16"), 2)
    with pytest.raises(ValueError, match="too short"):
        FakeRunner(pool)
    pool.close()
