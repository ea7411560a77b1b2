"""KvCache: what is found, what is evicted and when, and what a block may be at a time."""

from __future__ import annotations

import pytest

import libs.engine.kv.cache as cache_module
from libs.engine.kv.cache import KvCache
from libs.engine.kv.names import block_names, child_name
from libs.engine.sequence import Sequence
from libs.wire.messages import BlockEvent, Limits, Sampling

ROOT = b"r" * 32
OTHER_TENANT = b"s" * 32


def sequence(tokens: list[int], root: bytes = ROOT, request_id: str = "r") -> Sequence:
    return Sequence(request_id, root, list(tokens), len(tokens), Sampling(), Limits(max_tokens=8), 0)


def compute(kv: KvCache, tokens: list[int], root: bytes = ROOT) -> Sequence:
    """A sequence all of whose tokens were computed; it still holds its blocks."""
    seq = sequence(tokens, root)
    kv.admit(seq)
    assert kv.grow(seq, seq.num_tokens)
    seq.num_computed = seq.num_tokens
    kv.commit(seq)
    return seq


def run(kv: KvCache, tokens: list[int], root: bytes = ROOT) -> None:
    kv.release(compute(kv, tokens, root))


def hit(kv: KvCache, tokens: list[int], root: bytes = ROOT) -> int:
    seq = sequence(tokens, root)
    found = kv.admit(seq)
    kv.release(seq)
    return found


def counts(kv: KvCache) -> tuple[int, int, int]:
    assert kv.free + kv.cached + kv.used == kv.total
    assert kv.available == kv.free + kv.cached
    return kv.free, kv.cached, kv.used


PROMPT = list(range(100, 132))  # 2 blocks of 16, or 8 of 4


# ---------------------------------------------------------------- finding prefixes


def test_a_new_cache_is_free_and_knows_nothing() -> None:
    kv = KvCache(8, 4)
    assert counts(kv) == (8, 0, 0)
    assert hit(kv, PROMPT) == 0
    assert kv.names() == []


def test_a_prompt_finds_its_prefix_again() -> None:
    kv = KvCache(16, 4)
    run(kv, PROMPT)
    assert counts(kv) == (8, 8, 0)
    seq = sequence([*PROMPT[:20], 7, 7, 7, 7, 7])
    assert kv.admit(seq) == 20
    assert (seq.num_computed, seq.num_cached, len(seq.blocks), len(seq.names)) == (20, 20, 5, 5)
    assert counts(kv) == (8, 3, 5)


def test_a_full_hit_leaves_a_token_to_compute() -> None:
    """Logits come from computing: of a prompt that is known to its last token, that one is computed again."""
    kv = KvCache(8, 16)
    run(kv, PROMPT)
    assert hit(kv, PROMPT) == 31
    assert hit(kv, [*PROMPT, 1]) == 32
    assert hit(kv, PROMPT[:17]) == 16
    assert hit(kv, PROMPT[:16]) == 15
    assert hit(kv, PROMPT[:1]) == 0


def test_another_root_finds_nothing() -> None:
    kv = KvCache(16, 4)
    run(kv, PROMPT)
    assert hit(kv, PROMPT, OTHER_TENANT) == 0


def test_a_block_is_invisible_until_it_is_computed() -> None:
    kv = KvCache(16, 4)
    writer = sequence(PROMPT)
    kv.admit(writer)
    kv.grow(writer, 32)
    names = block_names(ROOT, PROMPT, 4)
    for computed in (0, 3, 4, 7, 13, 32):
        writer.num_computed = computed
        assert len(kv.lookup(names)) <= computed // 4  # before the commit
        kv.commit(writer)
        assert kv.lookup(names) == writer.blocks[: computed // 4]
        assert hit(kv, [*PROMPT, 1]) == computed // 4 * 4


def test_blocks_of_a_request_that_failed_before_they_were_full_are_free() -> None:
    kv = KvCache(16, 4)
    writer = sequence(PROMPT)
    kv.admit(writer)
    kv.grow(writer, 32)
    writer.num_computed = 10
    kv.commit(writer)
    kv.release(writer)
    assert counts(kv) == (14, 2, 0)
    assert hit(kv, PROMPT) == 8


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    kv = KvCache(16, 4)
    seq = sequence(PROMPT[:6])
    kv.admit(seq)
    for token in (1, 2, 3, 4):
        assert kv.grow(seq, seq.num_tokens)
        seq.num_computed = seq.num_tokens
        kv.commit(seq)
        seq.append(token)
    kv.release(seq)
    assert hit(kv, [*PROMPT[:6], 1, 2, 3, 4, 99]) == 8


def test_lookup_ends_at_the_first_unknown_name() -> None:
    kv = KvCache(16, 4)
    seq = compute(kv, PROMPT)
    names = block_names(ROOT, PROMPT, 4)
    assert kv.lookup(names) == seq.blocks
    assert kv.lookup([names[0], b"?" * 32, names[1]]) == seq.blocks[:1]
    assert kv.lookup([b"?" * 32, *names]) == []


def test_colliding_names_give_no_foreign_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "child_name", lambda parent, tokens: b"x" * 32)
    kv = KvCache(32, 4)
    a, b = [1, 1, 1, 1, 2, 2, 2, 2, 3], [9, 9, 9, 9, 2, 2, 2, 2, 3]
    run(kv, a)
    assert hit(kv, a) == 4
    assert hit(kv, b) == 0
    run(kv, b)
    assert hit(kv, b) == 0
    assert hit(kv, a) == 4
    assert counts(kv) == (31, 1, 0)


def test_blocks_behind_a_collision_get_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """`b`'s second block, found under a's prefix, would be foreign KV although its own tokens match."""
    monkeypatch.setattr(
        cache_module,
        "child_name",
        lambda parent, tokens: b"x" * 32 if parent == ROOT else child_name(parent, tokens),
    )
    kv = KvCache(32, 4)
    a, b = [1, 1, 1, 1, 2, 2, 2, 2, 3], [9, 9, 9, 9, 2, 2, 2, 2, 3]
    run(kv, a[:4])
    run(kv, b)
    assert hit(kv, a) == 4


def test_only_prompt_tokens_count_as_cached() -> None:
    kv = KvCache(16, 4)
    run(kv, PROMPT[:12])
    moved = Sequence(
        "r", ROOT, PROMPT[:14], 6, Sampling(), Limits(max_tokens=99), 0
    )  # 8 of them generated elsewhere
    assert kv.admit(moved) == 12
    assert moved.num_cached == 6


# ---------------------------------------------------------------- taking and giving back


def test_growing_is_all_or_nothing() -> None:
    kv = KvCache(4, 4)
    one, two = sequence([1] * 9), sequence([2] * 8)
    assert kv.grow(one, 9)
    assert counts(kv) == (1, 0, 3)
    assert not kv.grow(two, 8)
    assert two.blocks == []
    assert counts(kv) == (1, 0, 3)
    assert kv.grow(two, 4)
    assert kv.grow(one, 12)  # fits what it has
    assert not kv.grow(one, 13)


def test_reserving_takes_prefix_and_room_or_nothing() -> None:
    kv = KvCache(6, 4)
    run(kv, PROMPT[:16])
    seq = sequence([*PROMPT[:16], 5, 6])
    assert not kv.reserve(seq, keep_available=2)  # 4 cached and 1 new leave 1
    assert (seq.blocks, seq.num_computed, counts(kv)) == ([], 0, (2, 4, 0))
    assert kv.reserve(seq, keep_available=1)
    assert (len(seq.blocks), seq.num_computed, counts(kv)) == (5, 16, (1, 0, 5))
    assert kv.reserve(seq, keep_available=99)  # nothing is missing


def test_reserving_never_evicts_the_prefix_it_found() -> None:
    kv = KvCache(4, 4)
    run(kv, PROMPT[:16])
    seq = sequence([*PROMPT[:8], 1, 2, 3, 4, 5, 6])
    assert kv.reserve(seq)
    assert seq.num_computed == 8
    assert len(set(seq.blocks)) == 4


def test_a_sequence_that_holds_blocks_is_not_admitted_again() -> None:
    kv = KvCache(8, 4)
    seq = compute(kv, PROMPT)
    with pytest.raises(ValueError, match="already holds 8"):
        kv.admit(seq)


def test_release_is_idempotent() -> None:
    kv = KvCache(8, 4)
    seq = compute(kv, PROMPT[:10])
    for _ in range(3):
        kv.release(seq)
        assert counts(kv) == (6, 2, 0)
        assert (seq.blocks, seq.names, seq.num_computed) == ([], [], 0)


def test_shared_blocks_stay_until_the_last_holder_leaves() -> None:
    kv = KvCache(8, 4)
    one = compute(kv, PROMPT[:8])
    two = sequence([*PROMPT[:8], 1])
    kv.admit(two)
    assert two.blocks == one.blocks
    kv.release(one)
    assert counts(kv) == (6, 0, 2)
    kv.release(two)
    assert counts(kv) == (6, 2, 0)


def test_the_second_to_compute_the_same_block_stays_anonymous() -> None:
    kv = KvCache(8, 4)
    one, two = sequence(PROMPT[:8]), sequence(PROMPT[:8])
    for seq in (one, two):
        kv.admit(seq)
        kv.grow(seq, 8)
    for seq in (one, two):
        seq.num_computed = 8
        kv.commit(seq)
    assert one.names == two.names
    assert kv.lookup(one.names) == one.blocks
    kv.release(two)
    assert counts(kv) == (6, 0, 2)
    kv.release(one)
    assert counts(kv) == (6, 2, 0)


def test_references_pin_used_and_cached_blocks_but_never_free_ones() -> None:
    kv = KvCache(4, 4)
    seq = compute(kv, PROMPT[:10])  # 2 named blocks, 1 partly filled
    blocks = list(seq.blocks)
    kv.ref(blocks)
    kv.release(seq)
    assert counts(kv) == (1, 0, 3)
    kv.unref(blocks)
    assert counts(kv) == (2, 2, 0)
    kv.ref(blocks[:2])
    assert counts(kv) == (2, 0, 2)
    with pytest.raises(ValueError, match="is free"):
        kv.ref([blocks[0], blocks[2]])
    assert counts(kv) == (2, 0, 2)  # nothing was half done
    kv.unref(blocks[:2])
    with pytest.raises(ValueError, match="not held"):
        kv.unref(blocks[:1])


def test_waiters_hear_of_blocks_that_become_available() -> None:
    kv = KvCache(4, 4)
    calls: list[int] = []
    kv.on_free(lambda: calls.append(kv.available))
    seq = compute(kv, PROMPT[:10])
    kv.ref(seq.blocks[:2])
    held = list(seq.blocks[:2])
    assert calls == []
    kv.release(seq)
    assert calls == [2]  # the third; two are pinned still
    kv.release(seq)
    assert calls == [2]
    kv.unref(held)
    assert calls == [2, 4]


# ---------------------------------------------------------------- eviction


def test_the_longest_unused_prompt_goes_first() -> None:
    kv = KvCache(6, 4)
    prompts = [[base] * 4 + [base + 1] * 4 for base in (10, 20, 30)]
    for prompt in prompts:
        run(kv, prompt)
    assert hit(kv, [*prompts[0], 1]) == 8  # used again
    run(kv, [40] * 8)
    assert [hit(kv, [*prompt, 1]) for prompt in prompts] == [8, 0, 8]


def test_leaves_go_before_their_parents() -> None:
    kv = KvCache(8, 4)
    run(kv, PROMPT)
    for evicted in range(1, 8):
        seq = sequence([evicted])
        assert kv.grow(seq, 4)
        assert hit(kv, [*PROMPT, 1]) == 32 - 4 * evicted
        assert len(kv.names()) == 8 - evicted


def test_leaves_of_a_lease_go_before_their_parents_as_well() -> None:
    kv = KvCache(8, 4)
    seq = compute(kv, PROMPT)
    leased = list(seq.blocks)
    kv.ref(leased)
    kv.release(seq)
    kv.unref(leased)
    assert kv.grow(sequence([0]), 12)
    assert hit(kv, [*PROMPT, 1]) == 20


def test_a_shared_prefix_outlives_the_branches_whoever_leaves_first() -> None:
    kv = KvCache(8, 4)
    one = compute(kv, [*PROMPT[:8], 1, 1, 1, 1])
    two = compute(kv, [*PROMPT[:8], 2, 2, 2, 2])
    kv.release(two)
    kv.release(one)
    filler = sequence([0])
    assert kv.grow(filler, 24)  # 4 free ones and both branches
    assert hit(kv, [*PROMPT[:8], 1]) == 8


def test_a_parent_named_by_somebody_else_outlives_its_child() -> None:
    """`two` computed the first block as well, but `one` named it and left long before."""
    kv = KvCache(8, 4)
    one, two = sequence(PROMPT[:4]), sequence(PROMPT[:8])
    for seq in (one, two):
        kv.admit(seq)
        kv.grow(seq, seq.num_tokens)
    for seq in (one, two):
        seq.num_computed = seq.num_tokens
        kv.commit(seq)
    kv.release(one)
    kv.release(two)
    assert counts(kv) == (6, 2, 0)
    assert kv.grow(sequence([0]), 28)
    assert hit(kv, [*PROMPT[:8], 1]) == 4


def test_an_evicted_block_has_lost_its_name_before_it_is_used_again() -> None:
    kv = KvCache(8, 4)
    prompts = [[letter] * 32 for letter in range(1, 9)]
    for prompt in prompts:  # each fills the whole pool
        assert hit(kv, prompt) == 0
        run(kv, prompt)
        assert kv.names() == list(block_names(ROOT, prompt, 4))
    assert hit(kv, prompts[0]) == 0
    assert kv.lookup(block_names(ROOT, prompts[0], 4)) == []


def test_pinned_blocks_are_never_evicted() -> None:
    kv = KvCache(4, 4)
    seq = compute(kv, PROMPT[:8])
    pinned = list(seq.blocks)
    kv.ref(pinned)
    kv.release(seq)
    assert not kv.grow(sequence([0]), 12)
    other = sequence([0])
    assert kv.grow(other, 8)
    assert not set(other.blocks) & set(pinned)


# ---------------------------------------------------------------- events


def test_events_tell_what_names_tells() -> None:
    kv = KvCache(4, 4)
    run(kv, PROMPT[:8])
    names = block_names(ROOT, PROMPT[:8], 4)
    assert kv.take_events() == [BlockEvent(True, names[0]), BlockEvent(True, names[1])]
    assert kv.take_events() == []
    kv.grow(sequence([0]), 12)
    assert kv.take_events() == [BlockEvent(False, names[1])]
    assert kv.names() == [names[0]]
    assert kv.num_events == 3


def test_a_full_outbox_drops_its_oldest_and_the_numbers_show_it() -> None:
    kv = KvCache(16, 4, max_events=3)
    run(kv, PROMPT)
    events = kv.take_events()
    names = block_names(ROOT, PROMPT, 4)
    assert [event.name for event in events] == list(names[-3:])
    assert kv.num_events - len(events) == 5  # the first one's number: 0 to 4 are lost
    assert kv.names() == list(names)


@pytest.mark.parametrize("wrong", [(0, 4, 1), (4, 0, 1), (4, 4, 0)])
def test_sizes_must_be_above_zero(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="num_blocks="):
        KvCache(wrong[0], wrong[1], max_events=wrong[2])
