"""What the store's index deletes: leaves first, down to the low mark, by each policy."""

from __future__ import annotations

import random

import pytest

from libs.store.eviction import POLICIES, make_policy
from libs.store.index import StoreIndex
from libs.store.key import ObjectKey, tenant_tag
from libs.store.lru import Lru
from tests.store_chains import chain, path, paths

KIB = 1024
EVERY_POLICY = pytest.mark.parametrize("policy", sorted(POLICIES))


def index_with(policy: str, capacity: int, **settings: float) -> StoreIndex:
    """Room for `capacity` objects of one KiB."""
    return StoreIndex(
        make_policy(policy), capacity_bytes=capacity * KIB, **{"high": 0.95, "low": 0.9, **settings}
    )


def write(index: StoreIndex, listed: list[str], now_s: float) -> None:
    for each in listed:
        index.add(each, KIB, now_s)


def assert_leaves_first(gone: list[str], left: set[str]) -> None:
    """`left`: objects in the store before these went, one after the other."""
    keys = {each: ObjectKey.parse(each) for each in left}
    for each in gone:
        left.remove(each)
        continued = {keys[other].parent for other in left}
        assert not continued.intersection(keys[each].blocks), "a parent went before its child"


def test_an_unknown_policy_is_an_error() -> None:
    with pytest.raises(KeyError):
        make_policy("random")


@EVERY_POLICY
def test_nothing_goes_below_the_high_mark(policy: str) -> None:
    index = index_with(policy, 10, high=0.8, low=0.5)
    write(index, paths(chain("a", 64)), now_s=1.0)
    assert index.victims(2.0) == []


@EVERY_POLICY
def test_above_the_high_mark_all_down_to_the_low_one(policy: str) -> None:
    index = index_with(policy, 10, high=0.8, low=0.5)
    names = chain("a", 72)
    write(index, paths(names), now_s=1.0)
    gone = index.victims(2.0)
    assert gone == paths(names)[:4:-1]
    assert index.num_bytes == 5 * KIB
    assert index.run(names) == 40
    assert index.victims(2.0) == []


@EVERY_POLICY
def test_the_work_is_spread_over_calls(policy: str) -> None:
    index = index_with(policy, 40, high=0.8, low=0.5)
    names = chain("a", 8 * 40)
    write(index, paths(names), now_s=1.0)
    batches = [index.victims(2.0, max_looks=7) for _ in range(60)]
    assert not batches[0]  # no leaf among the first
    assert max(map(len, batches)) <= 7
    assert [path for batch in batches for path in batch] == paths(names)[:19:-1]


def play(policy: str, seed: int, **settings: float) -> list[str]:
    """A life of chains that grow, branch and are used, as paths in the order in which they went."""
    rng = random.Random(seed)
    index, there, gone = index_with(policy, 40, **settings), set[str](), list[str]()
    chains = [chain(str(number), 8) for number in range(4)]
    for step in range(400):
        now_s = float(step)
        names = rng.choice(chains)
        cut = rng.randint(1, len(names))
        if rng.random() < 0.5:
            names = chain(f"step {step}", rng.randint(1, 30), names[:cut])
            chains.append(names)
        held = index.use(names, now_s)
        tenant = "one" if step % 3 else "two"
        new = paths(names, held, rng.choice((3, 8)), tenant=tenant)
        write(index, new, now_s)
        there.update(new)
        if there and rng.random() < 0.1:  # somebody else deleted one
            lost = rng.choice(sorted(there))
            index.remove(lost)
            there.remove(lost)
        victims = index.victims(now_s)
        assert_leaves_first(victims, set(there))
        there.difference_update(victims)
        gone += victims
        assert index.num_objects == len(there)
        assert index.num_bytes == len(there) * KIB == sum(index.tenant_bytes.values())
        assert index.num_bytes <= 0.95 * index.capacity_bytes
    return gone


@EVERY_POLICY
@pytest.mark.parametrize("settings", [{}, {"tenant_share": 0.5}, {"ttl_s": 30.0}])
@pytest.mark.parametrize("seed", range(5))
def test_leaves_first_whatever_happens(policy: str, settings: dict[str, float], seed: int) -> None:
    gone = play(policy, seed, **settings)
    assert len(gone) > 100
    assert play(policy, seed, **settings) == gone  # the same in every run


@EVERY_POLICY
def test_a_parent_waits_for_the_child_in_the_middle_of_it(policy: str) -> None:
    trunk = chain("trunk", 8)
    branch = chain("branch", 8, trunk[:3])
    index = index_with(policy, 2, high=1.0, low=0.4)
    write(index, [path(trunk, 0, 8), path(branch, 3, 8), path(chain("other", 8), 0, 8)], now_s=1.0)
    index.use(trunk, 2.0)
    gone = index.victims(20.0)
    assert len(gone) == 3
    assert gone.index(path(branch, 3, 8)) < gone.index(path(trunk, 0, 8))


@EVERY_POLICY
def test_a_child_that_comes_before_its_parent_still_goes_first(policy: str) -> None:
    names = chain("a", 16)
    index = index_with(policy, 2, high=0.9, low=0.1)
    write(index, paths(names)[::-1], now_s=1.0)
    assert index.victims(2.0) == paths(names)[::-1]


# ------------------------------------------------------------ time to live, quotas


@EVERY_POLICY
def test_what_nobody_used_for_so_long_goes(policy: str) -> None:
    index = index_with(policy, 100, ttl_s=10.0)
    old, kept = chain("old", 24), chain("kept", 24)
    write(index, paths(old) + paths(kept), now_s=1.0)
    assert index.victims(10.9) == []
    index.use(kept[:16], 10.0)
    gone = index.victims(11.0)
    assert sorted(gone) == sorted([*paths(old), paths(kept)[-1]])
    assert_leaves_first(gone, {*paths(old), *paths(kept)})
    assert index.victims(19.9) == []
    assert index.victims(20.0) == paths(kept)[1::-1]
    assert index.num_objects == 0


@EVERY_POLICY
def test_a_parent_does_not_expire_before_a_younger_child(policy: str) -> None:
    index = index_with(policy, 100, ttl_s=10.0)
    names = chain("a", 16)
    index.add(paths(names)[0], KIB, now_s=1.0)
    index.add(paths(names)[1], KIB, now_s=5.0)
    assert index.victims(12.0) == []
    assert index.victims(15.0) == paths(names)[::-1]


@EVERY_POLICY
def test_a_tenant_over_its_quota_loses_only_its_own(policy: str) -> None:
    index = index_with(policy, 20, tenant_share=0.5)
    greedy, modest = chain("greedy", 88), chain("modest", 64)
    write(index, paths(modest, tenant="modest"), now_s=1.0)  # older
    write(index, paths(greedy, tenant="greedy"), now_s=2.0)
    gone = index.victims(3.0)
    assert gone == paths(greedy, tenant="greedy")[:8:-1]
    assert index.tenant_bytes == {tenant_tag("modest"): 8 * KIB, tenant_tag("greedy"): 9 * KIB}
    assert index.victims(3.0) == []


@EVERY_POLICY
def test_the_store_takes_from_all_tenants(policy: str) -> None:
    index = index_with(policy, 100, high=0.5, low=0.1)
    for number in range(60):
        write(index, paths(chain(str(number), 8), tenant=f"tenant {number % 7}"), now_s=float(number))
    assert len(index.victims(100.0)) == 50
    assert all(index.run(chain(str(number), 8)) == 0 for number in range(50))
    assert all(index.run(chain(str(number), 8)) == 8 for number in range(50, 60))


@EVERY_POLICY
def test_more_tenants_than_looks_keep_nothing_from_going(policy: str) -> None:
    index = index_with(policy, 60, high=0.5, low=0.4, ttl_s=1e6, tenant_share=0.5)
    for number in range(60):
        write(index, paths(chain(str(number), 8), tenant=f"tenant {number}"), now_s=float(number))
    batches = [index.victims(100.0, max_looks=10) for _ in range(4)]
    assert [len(batch) for batch in batches] == [10, 10, 10, 6]
    assert index.num_bytes == 24 * KIB


# ------------------------------------------------------------ the policies' own ideas


def test_lru_keeps_what_was_used_last() -> None:
    index = index_with("lru", 3, high=1.0, low=0.5)
    chains = {label: chain(label, 8) for label in "abcd"}
    for number, names in enumerate(chains.values()):
        write(index, paths(names), now_s=float(number))
    index.use(chains["a"], 10.0)
    assert index.victims(11.0) == [*paths(chains["b"]), *paths(chains["c"]), *paths(chains["d"])]
    assert index.run(chains["a"]) == 8


def test_lru_takes_the_tail_that_was_left_behind() -> None:
    index = index_with("lru", 6, high=1.0, low=0.7)
    names, other = chain("a", 32), chain("b", 24)
    write(index, paths(names), now_s=1.0)
    write(index, paths(other), now_s=2.0)
    index.use(names[:16], 3.0)  # the session went back and goes on from its middle
    assert index.victims(4.0) == [paths(names)[3], paths(names)[2], paths(other)[2]]


def test_s3fifo_lets_a_scan_pass_by() -> None:
    """Objects that are used once do not drive out one that is used twice and then left alone for a while."""
    survivors = {}
    for policy in ("lru", "s3fifo"):
        index = index_with(policy, 20)
        popular = chain("popular", 8)
        write(index, paths(popular), now_s=0.0)
        index.use(popular, 1.0)
        index.use(popular, 2.0)
        for number in range(60):
            write(index, paths(chain(str(number), 8)), now_s=10.0 + number)
            index.victims(10.0 + number)
        survivors[policy] = index.run(popular)
    assert survivors == {"lru": 0, "s3fifo": 8}


def test_s3fifo_remembers_what_it_has_just_let_go() -> None:
    index, gone = index_with("s3fifo", 20), list[str]()
    for number in range(40):
        write(index, paths(chain(str(number), 8)), now_s=float(number))
        gone = index.victims(float(number)) or gone
    assert gone
    again = next(chain(str(n), 8) for n in range(40) if paths(chain(str(n), 8)) == gone[-1:])
    write(index, paths(again), now_s=50.0)  # straight into the main queue
    for number in range(40, 50):
        write(index, paths(chain(str(number), 8)), now_s=float(number) + 20)
        index.victims(float(number) + 20)
    assert index.run(again) == 8


def test_cost_keeps_what_took_more_computing() -> None:
    deep, shallow = chain("deep", 2000), chain("shallow", 8)
    gone = {}
    for policy in ("lru", "cost"):
        index = index_with(policy, 251, high=0.999, low=0.997)
        write(index, paths(deep), now_s=1.0)
        write(index, paths(shallow), now_s=2.0)  # younger, and cheaper to compute
        gone[policy] = index.victims(3.0)
    assert gone == {"lru": paths(deep)[-1:], "cost": paths(shallow)}


def test_cost_forgets_what_was_popular_once() -> None:
    index = index_with("cost", 10)
    popular = chain("popular", 8)
    write(index, paths(popular), now_s=0.0)
    for step in range(100):
        index.use(popular, float(step))
    for number in range(100):
        write(index, paths(chain(str(number), 8)), now_s=200.0 + number)
        index.victims(200.0 + number)
    assert index.run(popular) == 0


def test_an_order_does_not_grow_with_what_is_gone() -> None:
    order = Lru()
    index = StoreIndex(order, capacity_bytes=1 << 40)
    for number in range(2000):
        listed = paths(chain(str(number), 8))
        write(index, listed, now_s=float(number))
        index.remove(listed[0])
    assert sum(map(len, order._heaps.values())) < 200
