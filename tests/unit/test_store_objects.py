"""Objects: what is read is what was written, or an error that says why. Rows 31, 49, 52 of the field's bugs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.engine.kv.layout import KvLayout
from libs.store.header import ALIGN, DIGEST_BYTES, digest, header_bytes
from libs.store.interface import ObjectDamaged, ObjectGone, Store, StoredObject, StoreError
from libs.store.key import KEY_BYTES, MAX_BLOCKS
from libs.store.objects import BlockRecord, ObjectFormat, check_object, read_blocks, write_object
from tests.store_contract import CONTRACT
from tests.store_rig import FORMAT, LAYOUT, Chain, MemoryStore, make_chain

COUNT = 3
CHAIN = make_chain(7, COUNT, behind=1)
HEADER_BYTES = header_bytes(COUNT, LAYOUT.block_size)
GOLDEN_CHAIN = Chain(
    FORMAT, "default", bytes(range(32)), (BlockRecord(b"\xab" * 32, (1, 2, 3, 2**32 - 1)),), [bytes(256)]
)
GOLDEN_HEADER = (
    "4241544f4e4b560001000000b0000000010000000400000000010000000000000cd592976b916d2fd0c8f488e44cfba3"
    "9df7b7f17e521477e8bb57ca1606a31b000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "abababababababababababababababababababababababababababababababab010000000200000003000000ffffffff"
    "bb039d71e9630a91a68dfbb1d75c6e8d8009301ad3df6aa4aaef841746c1450b"
)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def stored(store: MemoryStore) -> StoredObject:
    return CHAIN.write(store)


def damage(store: MemoryStore, key: str, change: Callable[[bytearray], None]) -> None:
    data = bytearray(store.objects[key])
    change(data)
    store.objects[key] = bytes(data)


def flip(at: int, bit: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[at] ^= bit

    return change


def reason(store: Store, key: str, chain: Chain = CHAIN, first: int = 0) -> str:
    with pytest.raises(ObjectDamaged) as caught:
        chain.read(store, key, first)
    assert caught.value.key == key
    return caught.value.reason


def seal(data: bytearray) -> None:
    """Makes the header's digest right again."""
    body = HEADER_BYTES - DIGEST_BYTES
    data[body:HEADER_BYTES] = digest(data[:body])


@pytest.mark.parametrize("check", CONTRACT)
def test_the_store_of_these_tests_is_one(check: Callable[[Store], None], store: MemoryStore) -> None:
    if check.__name__ != "a_long_listing_is_whole":  # it has one page
        check(store)


# ------------------------------------------------------------ format


def test_the_golden_object(store: MemoryStore) -> None:
    """Whoever changes these bytes makes a new version: stores outlive programs."""
    GOLDEN_CHAIN.write(store)
    data = store.objects[GOLDEN_CHAIN.key]
    assert data[: header_bytes(1, 4)].hex() == GOLDEN_HEADER
    assert data[header_bytes(1, 4) :] == bytes(ALIGN - header_bytes(1, 4) + 256)


def test_an_object_says_where_and_how_large_it_is(store: MemoryStore, stored: StoredObject) -> None:
    assert stored.key == CHAIN.key
    assert stored.num_bytes == len(store.objects[stored.key]) == FORMAT.object_bytes(COUNT) == 4096 + 3 * 256
    assert FORMAT.block_offset(COUNT, 1) == 4096 + 256


@settings(deadline=None)
@given(count=st.integers(1, MAX_BLOCKS), behind=st.integers(0, 3), data=st.data())
def test_any_run_of_any_object_comes_back(count: int, behind: int, data: st.DataObject) -> None:
    store, chain = MemoryStore(), make_chain(count, count, behind=behind)
    key = chain.write(store).key
    first = data.draw(st.integers(0, count - 1))
    length = data.draw(st.integers(0, count - first))
    assert chain.read(store, key, first, length) == chain.data[first : first + length]


def test_a_header_may_be_longer_than_a_page(store: MemoryStore) -> None:
    chain = make_chain(1, 4, format=ObjectFormat("m", KvLayout(1, 1, 2, block_size=512)))
    key = chain.write(store).key
    assert chain.format.block_offset(4, 0) == 3 * ALIGN
    assert chain.read(store, key, 2) == chain.data[2:]
    assert check_object(store, key) == 4


def test_one_read_fetches_header_and_blocks(store: MemoryStore, stored: StoredObject) -> None:
    CHAIN.read(store, stored.key, 1)
    assert store.num_reads == 1


# ------------------------------------------------------------ damage


def test_every_flipped_byte_of_the_header_is_found(store: MemoryStore, stored: StoredObject) -> None:
    whole = store.objects[stored.key]
    for at in range(HEADER_BYTES):
        for bit in (1, 128):
            damage(store, stored.key, flip(at, bit))
            expected = "version" if 8 <= at < 12 else "header"
            assert (at, reason(store, stored.key)) == (at, expected)
            with pytest.raises(ObjectDamaged):
                check_object(store, stored.key)
            store.objects[stored.key] = whole


def test_padding_says_nothing(store: MemoryStore, stored: StoredObject) -> None:
    damage(
        store,
        stored.key,
        lambda data: data.__setitem__(slice(HEADER_BYTES, ALIGN), b"?" * (ALIGN - HEADER_BYTES)),
    )
    assert CHAIN.read(store, stored.key) == CHAIN.data


def test_every_flipped_byte_of_a_block_is_found_by_who_reads_it(
    store: MemoryStore, stored: StoredObject
) -> None:
    whole = store.objects[stored.key]
    for at in range(ALIGN, len(whole)):
        damage(store, stored.key, flip(at, 0x10))
        assert reason(store, stored.key) == "checksum"
        block = (at - ALIGN) // LAYOUT.block_bytes
        assert CHAIN.read(store, stored.key, 0, block) == CHAIN.data[:block]  # blocks before it are of use
        with pytest.raises(ObjectDamaged, match=CHAIN.records[block].name[:KEY_BYTES].hex()):
            check_object(store, stored.key)
        store.objects[stored.key] = whole


def test_every_truncation_is_found(store: MemoryStore, stored: StoredObject) -> None:
    whole = store.objects[stored.key]
    for length in range(len(whole)):
        store.objects[stored.key] = whole[:length]
        assert reason(store, stored.key) == "short"


def test_blocks_before_the_cut_are_of_use(store: MemoryStore, stored: StoredObject) -> None:
    damage(store, stored.key, lambda data: data.__delitem__(slice(-1, None)))
    assert CHAIN.read(store, stored.key, 0, 2) == CHAIN.data[:2]
    assert reason(store, stored.key, first=2) == "short"


@settings(deadline=None)
@given(st.data())
def test_random_damage_never_passes(data: st.DataObject) -> None:
    store = MemoryStore()
    key = CHAIN.write(store).key
    content = bytearray(store.objects[key])
    start = data.draw(st.integers(0, len(content) - 1))
    junk = data.draw(st.binary(min_size=1, max_size=600))
    content[start : start + len(junk)] = junk
    store.objects[key] = bytes(content)
    try:
        read = CHAIN.read(store, key)
    except ObjectDamaged:
        return
    assert read == CHAIN.data  # only padding, or bytes that were the same


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_other_versions_are_not_read(store: MemoryStore, stored: StoredObject, version: int) -> None:
    def change(data: bytearray) -> None:
        data[8:12] = version.to_bytes(4, "little")
        seal(data)

    damage(store, stored.key, change)
    assert reason(store, stored.key) == "version"


OTHERS = {
    "model": replace(FORMAT, model_fingerprint="model-b"),
    "dtype": replace(FORMAT, layout=replace(LAYOUT, dtype="f32")),
    "numerics": replace(FORMAT, layout=replace(LAYOUT, numerics="avx512")),
    "shape of the same size": replace(FORMAT, layout=replace(LAYOUT, num_layers=1, num_kv_heads=2)),
    "smaller blocks": replace(FORMAT, layout=replace(LAYOUT, num_layers=1)),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_other_models_and_layouts_are_foreign(store: MemoryStore, other: ObjectFormat) -> None:
    theirs = CHAIN.of(other).write(store).key
    assert theirs != CHAIN.key
    store.objects[theirs] = store.objects[theirs].ljust(FORMAT.object_bytes(COUNT), b"\0")
    store.objects[CHAIN.key] = store.objects[theirs]
    assert (reason(store, theirs), reason(store, CHAIN.key)) == ("foreign", "foreign")


def test_blocks_of_more_tokens_are_foreign_though_their_header_is_not_read_to_its_end(
    store: MemoryStore,
) -> None:
    layout = replace(LAYOUT, block_size=1024)
    records = tuple(BlockRecord(record.name, tuple(range(1024))) for record in CHAIN.records)
    chain = replace(CHAIN.of(replace(FORMAT, layout=layout)), records=records)
    store.objects[CHAIN.key] = store.objects.pop(chain.write(store).key)
    assert reason(store, CHAIN.key) == "foreign"


@pytest.mark.parametrize("at", range(COUNT))
def test_another_name_with_the_same_key_is_foreign(store: MemoryStore, stored: StoredObject, at: int) -> None:
    """Two names that share their first 80 bits."""
    records = list(CHAIN.records)
    records[at] = BlockRecord(records[at].name[:KEY_BYTES] + bytes(22), records[at].tokens)
    theirs = replace(CHAIN, records=tuple(records))
    assert theirs.key == stored.key
    assert reason(store, stored.key, theirs) == "foreign"


@pytest.mark.parametrize("at", range(COUNT))
def test_other_tokens_under_the_same_name_are_foreign(
    store: MemoryStore, stored: StoredObject, at: int
) -> None:
    records = list(CHAIN.records)
    records[at] = BlockRecord(records[at].name, (*records[at].tokens[:-1], records[at].tokens[-1] ^ 1))
    assert reason(store, stored.key, replace(CHAIN, records=tuple(records))) == "foreign"


def test_a_key_that_lies_about_blocks_nobody_asked_for_is_foreign(
    store: MemoryStore, stored: StoredObject
) -> None:
    """The index believes listings: what it says of other blocks and of the parent has to be true as well."""
    for lie in (
        replace(CHAIN, parent=bytes(32)),
        replace(CHAIN, records=(*CHAIN.records[:2], make_chain(8, 1).records[0])),
    ):
        store.objects[lie.key] = store.objects[stored.key]
        with pytest.raises(ObjectDamaged, match="other blocks than its key"):
            CHAIN.read(store, lie.key, 0, 1)
        with pytest.raises(ObjectDamaged, match="other blocks than its key"):
            check_object(store, lie.key)


def test_what_the_key_has_not_is_not_looked_for(store: MemoryStore, stored: StoredObject) -> None:
    other = make_chain(8, COUNT)
    for key, chain, first in [
        (stored.key, other, 0),
        (stored.key, replace(CHAIN, records=(*CHAIN.records, *other.records)), 0),
        (stored.key, CHAIN, 1),
        ("../../etc/passwd", CHAIN, 0),
    ]:
        targets = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in chain.records]
        with pytest.raises(ObjectDamaged) as caught:
            read_blocks(store, FORMAT, key, first, chain.records, targets)
        assert caught.value.reason == "foreign"
    assert store.num_reads == 0


def test_check_finds_tokens_that_make_other_names(store: MemoryStore) -> None:
    records = (CHAIN.records[0], BlockRecord(CHAIN.records[1].name, (1, 2, 3, 4)))
    key = replace(CHAIN, records=records, data=CHAIN.data[:2]).write(store).key
    with pytest.raises(ObjectDamaged, match="tokens make other names"):
        check_object(store, key)


def test_check_finds_an_object_among_those_of_another_model(store: MemoryStore, stored: StoredObject) -> None:
    moved = CHAIN.of(OTHERS["model"]).key
    store.objects[moved] = store.objects[stored.key]
    with pytest.raises(ObjectDamaged, match="another model"):
        check_object(store, moved)


# ------------------------------------------------------------ failures


def test_what_the_store_says_is_passed_on(store: MemoryStore) -> None:
    with pytest.raises(ObjectGone):
        CHAIN.read(store, CHAIN.key)
    store.failure = StoreError("no")
    with pytest.raises(StoreError, match="no"):
        CHAIN.write(store)
    with pytest.raises(StoreError, match="no"):
        CHAIN.read(store, CHAIN.key)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(CHAIN, data=[b"x" * 255, *CHAIN.data[1:]]),
        replace(CHAIN, data=CHAIN.data[1:]),
        replace(CHAIN, records=(), data=[]),
        replace(CHAIN, records=CHAIN.records * 5, data=CHAIN.data * 5),
        replace(CHAIN, parent=b"short"),
        replace(CHAIN, parent=CHAIN.parent[:31]),
        replace(CHAIN, records=(BlockRecord(CHAIN.records[0].name, (1, 2, 3)),), data=CHAIN.data[:1]),
    ],
)
def test_what_makes_no_object_is_refused(store: MemoryStore, wrong: Chain) -> None:
    views = [memoryview(data) for data in wrong.data]
    with pytest.raises(ValueError):
        write_object(store, wrong.format, wrong.tenant, wrong.parent, wrong.records, views)
    assert store.objects == {}


def test_targets_of_another_size_are_refused(store: MemoryStore, stored: StoredObject) -> None:
    for targets in ([memoryview(bytearray(257))] * COUNT, [memoryview(bytearray(256))] * 2):
        with pytest.raises(ValueError):
            read_blocks(store, FORMAT, stored.key, 0, CHAIN.records, targets)
