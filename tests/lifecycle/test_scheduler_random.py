"""Random traffic on random pools: whatever happens, every answer is the oracle's and every block comes back."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import pytest

from libs.engine.fake import FakeModel
from libs.engine.kv.leases import LeaseTable
from libs.engine.sequence import Sequence
from libs.wire.errors import RequestRefused
from tests.lifecycle.engine_rig import Rig, expected, new_sequence, rig

NUM_RUNS = 40
MODEL = FakeModel(vocab_size=3)  # answers that repeat make for shared prefixes
BASE_SEED = int(os.environ.get("BATON_TEST_SEED") or random.SystemRandom().randrange(1 << 32))


@dataclass
class Traffic:
    """One run: arrivals, pulls, leases, aborts and failing steps, as `rng` decides."""

    rng: random.Random
    rig: Rig
    leases: LeaseTable
    requests: dict[str, Sequence] = field(default_factory=dict)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    held: list[Sequence] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    refused: int = 0

    def arrive(self) -> None:
        request_id = str(len(self.requests))
        prompt = [self.rng.randrange(3) for _ in range(self.rng.choice([1, 3, 8, 17, 33]))]
        if self.prompts and self.rng.random() < 0.5:  # the next turn of an earlier one
            other = self.rng.choice(list(self.prompts))
            prompt = (self.prompts[other] + self.rig.answers.get(other, []) + prompt)[:60]
        seq = new_sequence(request_id, prompt, max_tokens=self.rng.randrange(1, 25))
        try:
            if self.rng.random() < 0.3:
                self.rig.scheduler.check(len(prompt), num_held=len(self.held))
                self.held.append(seq)
            else:
                self.rig.scheduler.add(seq)
        except RequestRefused:
            self.refused += 1
            return
        self.requests[request_id], self.prompts[request_id] = seq, prompt

    def pull(self) -> None:
        """A held sequence gets its blocks and some of its KV from elsewhere, then joins the queue."""
        if not self.held:
            return
        seq = self.held[0]
        if not seq.blocks and not self.rig.scheduler.reserve(seq):
            return
        end = self.rng.randrange(seq.num_computed, seq.num_tokens)
        self.rig.runner.write(seq.tokens[seq.num_computed : end], seq.num_computed, seq.blocks)
        seq.num_computed = end
        self.rig.kv.commit(seq)
        self.held.pop(0)
        try:
            self.rig.scheduler.add(seq)
        except RequestRefused:
            self.rig.kv.release(seq)
            self.aborted.add(seq.request_id)

    def abort(self) -> None:
        if self.requests:
            seq = self.rng.choice(list(self.requests.values()))
            if self.rig.scheduler.remove(seq.request_id) is not None:
                self.aborted.add(seq.request_id)

    def lease(self, now_s: float) -> None:
        blocks = self.rig.kv.lookup(self.rng.sample(self.rig.kv.names(), min(1, len(self.rig.kv.names()))))
        if blocks:
            self.leases.add(self.leases.open(now_s, self.rng.uniform(0.5, 10.0)), blocks)

    def step(self) -> None:
        rows = self.rig.schedule()
        if not rows:
            return
        if self.rng.random() < 0.05:
            self.abort()  # while the step runs
        assert self.rig.plan is not None
        if self.rng.random() < 0.05:
            self.rig.runner.execute(self.rig.plan)
            self.rig.scheduler.discard(self.rig.plan)
        else:
            self.rig.finish()

    def check_plan_limits(self) -> None:
        kv = self.rig.kv
        assert kv.free + kv.cached + kv.used == kv.total

    def check_answers(self) -> None:
        room = self.rig.kv.total * self.rig.kv.block_size
        for request_id, prompt in self.prompts.items():
            answer = self.rig.answers.get(request_id, [])
            wanted = min(self.requests[request_id].limits.max_tokens, room + 1 - len(prompt))
            oracle = expected(prompt, wanted, MODEL)
            if request_id in self.aborted and request_id not in self.rig.reasons:
                assert answer == oracle[: len(answer)]
            else:
                assert answer == oracle
                assert self.rig.reasons[request_id] == "length"


@pytest.mark.parametrize("run", range(NUM_RUNS))
def test_every_answer_is_right_and_every_block_comes_back(run: int) -> None:
    seed = BASE_SEED + run
    print(f"BATON_TEST_SEED={seed} run 0")
    rng = random.Random(seed)
    sizes = {
        "max_rows": rng.choice([1, 2, 5, 32]),
        "max_step_tokens": rng.choice([2, 7, 16, 64]),
        "max_queue": rng.choice([1, 8, 64]),
    }
    if rng.random() < 0.5:
        sizes["max_chunk"] = rng.choice([1, 3, 8])
    with rig(rng.choice([5, 9, 16, 40]), rng.choice([1, 2, 4]), model=MODEL, **sizes) as r:
        traffic = Traffic(rng, r, LeaseTable(r.kv))
        for tick in range(300):
            if rng.random() < 0.15 and tick < 250:
                traffic.arrive()
            if rng.random() < 0.2:
                traffic.pull()
            if rng.random() < 0.03:
                traffic.abort()
            if rng.random() < 0.05:
                traffic.lease(tick)
            traffic.leases.reap(tick)
            traffic.step()
            traffic.check_plan_limits()
        traffic.leases.reap(1e9)
        for _ in range(10_000):
            if not (r.scheduler.num_sequences or traffic.held):
                break
            traffic.pull()
            traffic.step()
        traffic.check_answers()
        r.assert_idle()
