"""What every store does. Each function is a test of an empty store; `CONTRACT` has them all, for `parametrize`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from libs.store.interface import ObjectDamaged, ObjectGone, Store, StoredObject, StoreError
from libs.store.objects import check_object
from tests.store_rig import make_chain

NO_KEYS = [
    "",
    "x",
    "../../etc/passwd",
    "/etc/passwd",
    "tmp/1-a",
    make_chain(1, 1).key + "/..",
    make_chain(1, 1).key.upper(),
]


def listed(store: Store) -> list[StoredObject]:
    return [stored for page in store.list() for stored in page]


def keys(store: Store) -> list[str]:
    return sorted(stored.key for stored in listed(store))


def read(store: Store, key: str, *ranges: tuple[int, int]) -> list[bytes]:
    """Bytes of the ranges (offset, length)."""
    targets = [bytearray(length) for _, length in ranges]
    store.read(
        key, [(offset, memoryview(target)) for (offset, _), target in zip(ranges, targets, strict=True)]
    )
    return [bytes(target) for target in targets]


def an_empty_store_lists_nothing(store: Store) -> None:
    assert listed(store) == []


def blocks_come_back(store: Store) -> None:
    chain = make_chain(1, 14, behind=3)
    key = chain.write(store).key
    assert chain.read(store, key) == chain.data
    assert chain.read(store, key, 5, 4) == chain.data[5:9]
    assert check_object(store, key) == 14


def any_ranges_come_back(store: Store) -> None:
    rng = random.Random(2)
    key, data = make_chain(2, 1).key, rng.randbytes(3_000_000)
    store.put(key, [data[:1], b"", memoryview(data)[1:70_000], data[70_000:]])
    far = [(2_900_000, 100_000), (0, 1), (1, 4096), (4097, 0), (4097, 9)]  # unsorted, side by side, empty
    for ranges in (far, [(0, len(data))], [(rng.randrange(2_000_000), 999_999) for _ in range(3)], []):
        assert read(store, key, *ranges) == [data[at : at + length] for at, length in ranges]


def a_listing_tells_key_size_and_time(store: Store) -> None:
    began_s = time.time()
    wrote = [make_chain(seed, 1 + seed, tenant=f"t{seed}").write(store) for seed in range(3)]
    found = sorted(listed(store), key=lambda each: each.key)
    assert [(each.key, each.num_bytes) for each in found] == sorted(
        (each.key, each.num_bytes) for each in wrote
    )
    assert all(began_s - 2 <= each.used_s <= time.time() + 2 for each in found)  # S3 tells whole seconds


def a_long_listing_is_whole(store: Store) -> None:
    wrote = {make_chain(seed, 1).write(store).key for seed in range(1050)}
    pages = list(store.list())
    assert len(pages) > 1
    assert {stored.key for page in pages for stored in page} == wrote
    assert sum(map(len, pages)) == len(wrote)


def written_twice_is_there_once(store: Store) -> None:
    chain = make_chain(3, 2)
    assert chain.write(store).key == chain.write(store).key
    assert keys(store) == [chain.key]
    assert chain.read(store, chain.key) == chain.data


def a_damaged_object_of_another_length_is_replaced(store: Store) -> None:
    chain = make_chain(4, 2)
    store.put(chain.key, [b"short"])
    chain.write(store)
    assert chain.read(store, chain.key) == chain.data


def what_is_deleted_is_gone(store: Store) -> None:
    chain, other = make_chain(5, 2), make_chain(6, 2)
    chain.write(store)
    other.write(store)
    store.delete(chain.key)
    store.delete(chain.key)
    assert keys(store) == [other.key]
    with pytest.raises(ObjectGone):
        chain.read(store, chain.key)
    chain.write(store)
    assert chain.read(store, chain.key) == chain.data


def reading_what_never_was_is_gone(store: Store) -> None:
    with pytest.raises(ObjectGone):
        read(store, make_chain(7, 1).key, (0, 1))


def an_object_that_ends_early_is_short(store: Store) -> None:
    key = make_chain(8, 1).key
    store.put(key, [b"x" * 100])
    for ranges in [(0, 101)], [(99, 2)], [(100, 1)], [(5_000_000, 1)], [(0, 4), (200, 3)]:
        with pytest.raises(ObjectDamaged) as caught:
            read(store, key, *ranges)
        assert caught.value.reason == "short"


def an_object_that_is_cut_anywhere_is_damaged(store: Store) -> None:
    chain = make_chain(9, 2)
    stored = chain.write(store)
    (whole,) = read(store, stored.key, (0, stored.num_bytes))
    for length in (1, 95, 96, 200, 4095, 4096, 4097, 4352, stored.num_bytes - 1):
        store.put(stored.key, [whole[:length]])
        with pytest.raises(ObjectDamaged):
            chain.read(store, stored.key)
        with pytest.raises(ObjectDamaged):
            check_object(store, stored.key)


def touching_never_raises(store: Store) -> None:
    chain = make_chain(10, 1)
    chain.write(store)
    store.touch([chain.key, make_chain(11, 1).key, *NO_KEYS])
    assert keys(store) == [chain.key]


def other_paths_are_refused(store: Store) -> None:
    for key in NO_KEYS:
        for call in (lambda key: store.put(key, [b"x"]), lambda key: read(store, key, (0, 1)), store.delete):
            with pytest.raises(StoreError, match="no key"):
                call(key)
    assert listed(store) == []


CONTRACT: list[Callable[[Store], None]] = [
    an_empty_store_lists_nothing,
    blocks_come_back,
    any_ranges_come_back,
    a_listing_tells_key_size_and_time,
    a_long_listing_is_whole,
    written_twice_is_there_once,
    a_damaged_object_of_another_length_is_replaced,
    what_is_deleted_is_gone,
    reading_what_never_was_is_gone,
    an_object_that_ends_early_is_short,
    an_object_that_is_cut_anywhere_is_damaged,
    touching_never_raises,
    other_paths_are_refused,
]
