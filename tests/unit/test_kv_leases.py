"""Leases: blocks are pinned exactly as long as a lease says, whatever the peer does or fails to do."""

from __future__ import annotations

import contextlib
import random

import pytest

from libs.engine.kv.cache import KvCache
from libs.engine.kv.leases import LeaseExpired, LeaseTable
from libs.engine.sequence import Sequence
from libs.wire.errors import Code
from libs.wire.messages import Limits, Sampling


def blocks_in_use(kv: KvCache, num_tokens: int) -> tuple[Sequence, list[int]]:
    tokens = list(range(num_tokens))
    seq = Sequence("r", b"r" * 32, tokens, num_tokens, Sampling(), Limits(max_tokens=1), 0)
    assert kv.grow(seq, num_tokens)
    seq.num_computed = num_tokens
    kv.commit(seq)
    return seq, list(seq.blocks)


def test_a_lease_outlives_the_sequence_until_it_is_released() -> None:
    kv = KvCache(8, 4)
    leases = LeaseTable(kv)
    seq, blocks = blocks_in_use(kv, 10)
    lease_id = leases.open(0.0, 30.0)
    leases.add(lease_id, blocks[:2])
    leases.add(lease_id, blocks[2:])  # a later offer under the same lease
    kv.release(seq)
    assert (kv.used, leases.count) == (3, 1)
    assert leases.release(lease_id)
    assert (kv.used, kv.cached, kv.free, leases.count) == (0, 2, 6, 0)


def test_release_is_idempotent_also_after_expiry_and_for_unknown_ids() -> None:
    kv = KvCache(8, 4)
    leases = LeaseTable(kv)
    seq, blocks = blocks_in_use(kv, 8)
    lease_id = leases.open(0.0, 5.0)
    leases.add(lease_id, blocks)
    assert leases.reap(5.0) == [lease_id]
    assert not leases.release(lease_id)
    assert not leases.release(lease_id)
    assert not leases.release("never was")
    assert kv.used == 2  # the sequence's own references are untouched
    kv.release(seq)
    assert kv.used == 0


def test_reaping_ends_only_what_ran_out() -> None:
    kv = KvCache(8, 4)
    leases = LeaseTable(kv)
    short, long = leases.open(0.0, 1.0), leases.open(0.0, 10.0)
    assert leases.next_expiry_s == 1.0
    assert leases.reap(0.999) == []
    assert leases.reap(1.0) == [short]
    assert leases.next_expiry_s == 10.0
    assert leases.reap(1e9) == [long]
    assert leases.next_expiry_s is None


def test_renewing_extends_and_never_shortens() -> None:
    leases = LeaseTable(KvCache(8, 4))
    lease_id = leases.open(0.0, 10.0)
    leases.renew(lease_id, 1.0, 2.0)
    assert leases.next_expiry_s == 10.0
    leases.renew(lease_id, 5.0, 10.0)
    assert leases.reap(14.9) == []
    assert leases.reap(15.0) == [lease_id]


def test_an_ended_lease_takes_no_more_blocks() -> None:
    kv = KvCache(8, 4)
    leases = LeaseTable(kv)
    _, blocks = blocks_in_use(kv, 8)
    lease_id = leases.open(0.0, 1.0)
    leases.reap(1.0)
    with pytest.raises(LeaseExpired) as caught:
        leases.add(lease_id, blocks)
    assert caught.value.code is Code.KV_UNAVAILABLE
    with pytest.raises(LeaseExpired):
        leases.renew(lease_id, 1.0, 1.0)
    assert kv.used == 2


def test_a_free_block_cannot_be_leased() -> None:
    kv = KvCache(8, 4)
    leases = LeaseTable(kv)
    seq, blocks = blocks_in_use(kv, 6)
    kv.release(seq)
    lease_id = leases.open(0.0, 1.0)
    with pytest.raises(ValueError, match="is free"):
        leases.add(lease_id, blocks)  # the second was partly filled, and is free now
    leases.add(lease_id, blocks[:1])
    leases.release(lease_id)
    assert (kv.free, kv.cached) == (7, 1)


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_lease_must_end_and_not_at_once(lease_s: float) -> None:
    with pytest.raises(ValueError, match="lease_s"):
        LeaseTable(KvCache(8, 4)).open(0.0, lease_s)


def test_ids_are_long_and_never_repeat() -> None:
    leases = LeaseTable(KvCache(8, 4))
    ids = set()
    for _ in range(1000):
        lease_id = leases.open(0.0, 1.0)
        leases.release(lease_id)
        ids.add(lease_id)
    assert len(ids) == 1000
    assert all(len(lease_id) == 32 for lease_id in ids)


def test_after_any_storm_every_block_is_back() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    kv = KvCache(32, 4)
    leases = LeaseTable(kv)
    known: list[str] = []
    now_s = 0.0
    for step in range(500):
        now_s += rng.random()
        action = rng.randrange(4)
        if action == 0:
            tokens = [step] * rng.randrange(1, 30)
            seq = Sequence("r", b"r" * 32, tokens, len(tokens), Sampling(), Limits(max_tokens=1), 0)
            if kv.grow(seq, len(tokens)):
                seq.num_computed = len(tokens)
                kv.commit(seq)
                known.append(leases.open(now_s, rng.uniform(0.1, 5.0)))
                leases.add(known[-1], seq.blocks)
                kv.release(seq)
        elif action == 1 and known:
            leases.release(rng.choice(known))
        elif action == 2 and known:
            with contextlib.suppress(LeaseExpired):
                leases.renew(rng.choice(known), now_s, rng.uniform(0.1, 5.0))
        else:
            leases.reap(now_s)
        assert kv.free + kv.cached + kv.used == kv.total
    leases.reap(now_s + 10.0)
    assert (leases.count, kv.used) == (0, 0)
