"""The store's index: which blocks of a prompt are there and in which objects, and what a listing changes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from libs.store.index import Located, StoreIndex
from libs.store.key import MAX_BLOCKS, ObjectKey, block_key
from libs.store.lru import Lru
from tests.store_chains import NAMESPACE, chain, path, paths

KIB = 1024


def index_of(*listed: str) -> StoreIndex:
    index = StoreIndex(Lru(), capacity_bytes=1 << 40)
    for each in listed:
        assert index.add(each, KIB, now_s=1.0)
    return index


# ------------------------------------------------------------ what is there


@pytest.mark.parametrize("start", [0, 3, 8, 15])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 20, 24])
def test_a_run_begins_and_ends_anywhere(start: int, length: int) -> None:
    names = chain("a", 24)
    index = index_of(*paths(names[:20]))
    asked = names[start : start + length]
    expected = max(0, min(len(asked), 20 - start))
    assert index.run(asked) == expected
    assert sum(located.count for located in index.locate(asked)) == expected


def test_locate_says_which_blocks_of_which_object() -> None:
    names = chain("a", 24)
    first, second, third = paths(names[:20])
    index = index_of(first, second, third)
    assert index.locate(names) == [
        Located(first, first=0, start=0, count=8),
        Located(second, first=0, start=8, count=8),
        Located(third, first=0, start=16, count=4),
    ]
    assert index.locate(names[6:10]) == [
        Located(first, first=6, start=0, count=2),
        Located(second, first=0, start=2, count=2),
    ]


def test_a_prompt_that_leaves_in_the_middle_of_an_object() -> None:
    trunk = chain("trunk", 8)
    branch = chain("branch", 6, trunk[:3])
    index = index_of(path(trunk, 0, 8), path(branch, 3, 6))
    assert index.run(branch) == 9
    assert index.run(trunk) == 8
    assert [(each.first, each.start, each.count) for each in index.locate(branch)] == [(0, 0, 3), (0, 3, 6)]


def test_of_several_objects_the_one_that_covers_most_is_read() -> None:
    names = chain("a", 12)
    short, long, overlapping = path(names, 0, 2), path(names, 0, 8), path(names, 6, 6)
    for listed in ([short, long, overlapping], [overlapping, long, short]):
        index = index_of(*listed)
        assert index.locate(names) == [
            Located(long, first=0, start=0, count=8),
            Located(overlapping, first=2, start=8, count=4),
        ]
        assert index.num_blocks == 16


def test_a_block_in_two_objects_is_there_until_both_are_gone() -> None:
    names = chain("a", 4)
    one, other = path(names, 0, 4), path(names, 0, 3)
    for first, second in ((one, other), (other, one)):
        index = index_of(one, other)
        assert index.remove(first)
        assert index.run(names[:3]) == 3
        assert index.remove(second)
        assert index.run(names) == 0
        assert (index.num_objects, index.num_blocks, index.num_bytes, index.tenant_bytes) == (0, 0, 0, {})


def test_blocks_behind_a_missing_parent_are_no_run_but_are_there() -> None:
    names = chain("a", 16)
    index = index_of(path(names, 8, 8))
    assert index.run(names) == 0
    assert index.run(names[8:]) == 8
    assert index.add(path(names, 0, 8), KIB, now_s=2.0)
    assert index.run(names) == 16


def test_adding_twice_counts_once() -> None:
    names = chain("a", 8)
    index = index_of(path(names, 0, 8))
    assert not index.add(path(names, 0, 8), KIB, now_s=2.0)
    assert (index.num_objects, index.num_blocks, index.num_bytes) == (1, 8, KIB)


def test_removing_what_is_not_there_is_harmless() -> None:
    assert not index_of().remove(path(chain("a", 8), 0, 8))


@pytest.mark.parametrize("listed", ["", "a/b/c/d", "../../etc/passwd", path(chain("a", 8), 0, 8)[:-1]])
def test_a_path_that_is_no_key_is_refused(listed: str) -> None:
    index = index_of()
    with pytest.raises(ValueError, match="no key"):
        index.add(listed, KIB, now_s=1.0)
    assert index.num_objects == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"capacity_bytes": 0},
        {"capacity_bytes": 1, "high": 0.5, "low": 0.6},
        {"capacity_bytes": 1, "tenant_share": 0.0},
        {"capacity_bytes": 1, "ttl_s": 0.0},
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="="):
        StoreIndex(Lru(), **settings)  # type: ignore[arg-type]


def test_bytes_are_counted_for_each_tenant() -> None:
    names = chain("a", 8)
    index = index_of(path(names, 0, 8, tenant="one"), path(names, 0, 4, tenant="two"))
    assert sorted(index.tenant_bytes.values()) == [KIB, KIB]
    index.remove(path(names, 0, 4, tenant="two"))
    tenant = ObjectKey.parse(path(names, 0, 8, tenant="one")).tenant
    assert index.tenant_bytes == {tenant: KIB}


class Reference:
    """The obvious index: every object's blocks in a list."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, ...]] = {}

    def run(self, names: Sequence[bytes]) -> int:
        there = {key for blocks in self.objects.values() for key in blocks}
        held = (at for at, name in enumerate(names) if block_key(name) not in there)
        return next(held, len(names))


def forest(rng: random.Random) -> list[list[bytes]]:
    """Chains of which some leave others at any block."""
    chains = [chain("0", rng.randint(1, 40))]
    for number in range(1, 12):
        behind = rng.choice(chains) if rng.random() < 0.8 else []
        chains.append(chain(str(number), rng.randint(1, 30), behind[: rng.randint(0, len(behind))]))
    return chains


@pytest.mark.parametrize("seed", range(20))
def test_like_an_obvious_index_through_any_changes(seed: int) -> None:
    rng = random.Random(seed)
    chains, index, reference = forest(rng), StoreIndex(Lru(), capacity_bytes=1 << 40), Reference()
    for step in range(300):
        names = rng.choice(chains)
        if rng.random() < 0.6 or not reference.objects:
            first = rng.randrange(len(names))
            listed = path(names, first, min(rng.randint(1, MAX_BLOCKS), len(names) - first))
            assert index.add(listed, KIB, float(step)) == (listed not in reference.objects)
            reference.objects[listed] = ObjectKey.parse(listed).blocks
        else:
            listed = rng.choice(sorted(reference.objects))
            assert index.remove(listed)
            del reference.objects[listed]
        asked = rng.choice(chains)[rng.randint(0, 5) :]
        located = index.locate(asked)
        assert index.run(asked) == index.use(asked, float(step)) == reference.run(asked)
        assert [each.start for each in located] == [
            sum(each.count for each in located[:at]) for at in range(len(located))
        ]
        for each in located:
            blocks = reference.objects[each.path][each.first : each.first + each.count]
            assert blocks == tuple(map(block_key, asked[each.start : each.start + each.count]))
    assert index.num_objects == len(reference.objects)
    assert index.num_blocks == sum(map(len, reference.objects.values()))
    for listed in list(reference.objects):
        index.remove(listed)
    assert (index.num_objects, index.num_blocks, index.num_bytes, index.tenant_bytes) == (0, 0, 0, {})


# ------------------------------------------------------------ listings


def test_what_a_listing_lacks_is_dropped_and_what_it_has_is_known() -> None:
    old, new = chain("old", 8), chain("new", 8)
    index = index_of(*paths(old))
    index.begin_scan()
    index.seen(path(new, 0, 8), KIB, used_s=1.0)
    assert index.run(old) == 8  # until the listing is complete
    assert index.end_scan() == 1
    assert (index.run(old), index.run(new)) == (0, 8)


def test_what_comes_while_a_listing_is_read_stays() -> None:
    names = chain("a", 16)
    index = index_of()
    index.begin_scan()
    index.add(path(names, 0, 8), KIB, now_s=5.0)
    assert index.end_scan() == 0
    assert index.run(names) == 8
    index.begin_scan()
    assert index.end_scan() == 1  # by now it should have been listed


def test_what_goes_while_a_listing_is_read_does_not_come_back() -> None:
    names = chain("a", 8)
    index = index_of(*paths(names))
    index.begin_scan()
    index.remove(path(names, 0, 8))
    index.seen(path(names, 0, 8), KIB, used_s=1.0)
    assert index.run(names) == 0
    index.add(path(names, 0, 8), KIB, now_s=6.0)  # written anew
    index.end_scan()
    assert index.run(names) == 8


def test_a_victim_does_not_come_back_before_its_deletion_is_confirmed() -> None:
    names = chain("a", 8)
    index = StoreIndex(Lru(), capacity_bytes=KIB)
    index.add(path(names, 0, 8), 2 * KIB, now_s=1.0)
    assert index.victims(2.0) == paths(names)
    index.begin_scan()
    index.seen(path(names, 0, 8), 2 * KIB, used_s=1.0)
    index.end_scan()
    assert index.run(names) == 0
    assert index.remove(path(names, 0, 8))
    assert not index.remove(path(names, 0, 8))
    index.begin_scan()
    index.seen(path(names, 0, 8), 2 * KIB, used_s=1.0)  # it could not be deleted after all
    index.end_scan()
    assert index.run(names) == 8


def test_a_listing_that_failed_drops_nothing() -> None:
    old, new = chain("old", 8), chain("new", 8)
    index = index_of(*paths(old))
    index.begin_scan()
    index.seen(path(new, 0, 8), KIB, used_s=1.0)
    index.abandon_scan()
    index.abandon_scan()
    assert (index.run(old), index.run(new)) == (8, 8)
    index.begin_scan()
    index.begin_scan()  # the one before never ended
    index.seen(path(new, 0, 8), KIB, used_s=1.0)
    assert index.end_scan() == 1
    assert (index.run(old), index.run(new)) == (0, 8)


def test_without_a_listing_nothing_is_seen() -> None:
    index = index_of()
    with pytest.raises(RuntimeError, match="begin_scan"):
        index.seen(path(chain("a", 8), 0, 8), KIB, used_s=1.0)
    with pytest.raises(RuntimeError, match="begin_scan"):
        index.end_scan()


def test_a_listing_in_any_order_gives_the_same_index() -> None:
    names = chain("a", 100)
    listed = [*enumerate(paths(names))]
    random.Random(3).shuffle(listed)
    index = StoreIndex(Lru(), capacity_bytes=len(listed) * KIB, high=1.0, low=0.5)
    index.begin_scan()
    for number, each in listed:
        index.seen(each, KIB, used_s=100.0 - number)
    index.end_scan()
    assert index.run(names) == 100
    index.add(path(chain("b", 8), 0, 8), KIB, now_s=200.0)
    gone = index.victims(201.0)
    assert gone == paths(names)[-len(gone) :][::-1]


def test_a_forged_object_that_holds_a_block_twice() -> None:
    names = chain("a", 3)
    key, other = block_key(names[0]), block_key(names[1])
    forged = ObjectKey(NAMESPACE, "0" * 16, block_key(names[2]), (key, other, key, key)).path()
    for listed in ([forged, path(names, 0, 2)], [path(names, 0, 2), forged]):
        index = index_of(*listed)
        assert index.run(names) == 2
        assert index.remove(forged)
        assert index.run(names) == 2
        assert index.remove(path(names, 0, 2))
        assert index.run(names) == 0


def test_a_forged_object_that_is_its_own_parent_can_be_deleted() -> None:
    key = block_key(chain("a", 1)[0])
    forged = ObjectKey(NAMESPACE, "0" * 16, key, (key,)).path()
    index = StoreIndex(Lru(), capacity_bytes=KIB)
    index.add(forged, 2 * KIB, now_s=1.0)
    assert index.victims(2.0) == [forged]
