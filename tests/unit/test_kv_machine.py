"""KvCache under random use, against a model that remembers who holds a block and what was written into it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from libs.engine.kv.cache import KvCache
from libs.engine.kv.names import block_names
from libs.engine.sequence import Sequence
from libs.wire.messages import Limits, Sampling

BLOCK_SIZE = 2
ROOTS = (b"a" * 32, b"b" * 32)
tokens_strategy = st.lists(st.integers(0, 1), min_size=1, max_size=13)  # two ids: many shared prefixes


class KvCacheMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")
    pins = Bundle("pins")

    @initialize(num_blocks=st.integers(3, 12))
    def start(self, num_blocks: int) -> None:
        self.kv = KvCache(num_blocks, BLOCK_SIZE)
        self.holders: Counter[int] = Counter()
        self.content: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # block -> root, all tokens up to its end
        self.known: set[bytes] = set()  # from events alone
        self.notified = 0
        self.kv.on_free(self._count)

    def _count(self) -> None:
        self.notified += 1

    def _took(self, blocks: list[int]) -> None:
        """New blocks: nobody may hold them, and whatever stood in them is void."""
        for block in blocks:
            assert self.holders[block] == 0
            self.content.pop(block, None)
            self.holders[block] += 1

    def _gave(self, blocks: list[int]) -> None:
        self.holders.subtract(blocks)

    def _check_prefix(self, seq: Sequence) -> None:
        """What a prefix hit gives must be what computing it would have written."""
        for index, block in enumerate(seq.blocks[: seq.num_computed // BLOCK_SIZE]):
            end = (index + 1) * BLOCK_SIZE
            assert self.content[block] == (seq.root, tuple(seq.tokens[:end]))

    @rule(target=sequences, tokens=tokens_strategy, root=st.sampled_from(ROOTS))
    def arrive(self, tokens: list[int], root: bytes) -> Sequence:
        seq = Sequence("r", root, list(tokens), len(tokens), Sampling(), Limits(max_tokens=99), 0)
        found = self.kv.admit(seq)
        assert found == seq.num_computed == seq.num_cached
        assert found == min(len(seq.blocks) * BLOCK_SIZE, len(tokens) - 1)
        assert seq.blocks == self.kv.lookup(block_names(root, tokens, BLOCK_SIZE))
        self.holders.update(seq.blocks)
        self._check_prefix(seq)
        return seq

    @rule(target=sequences, tokens=tokens_strategy, keep=st.integers(0, 3))
    def reserve(self, tokens: list[int], keep: int) -> Sequence:
        seq = Sequence("r", ROOTS[0], list(tokens), len(tokens), Sampling(), Limits(max_tokens=99), 0)
        available = self.kv.available
        if self.kv.reserve(seq, keep_available=keep):
            hits = len(seq.names)
            self.holders.update(seq.blocks[:hits])
            self._took(seq.blocks[hits:])
            assert len(seq.blocks) == self.kv.blocks_for(len(tokens))
            assert self.kv.available >= keep or self.kv.available == available
            self._check_prefix(seq)
        else:
            assert (seq.blocks, seq.num_computed, self.kv.available) == ([], 0, available)
        return seq

    @rule(seq=sequences, more=st.integers(1, 5))
    def grow(self, seq: Sequence, more: int) -> None:
        before = list(seq.blocks)
        missing = self.kv.blocks_for(seq.num_computed + more) - len(before)
        possible = missing <= self.kv.available
        assert self.kv.grow(seq, seq.num_computed + more) == possible
        assert seq.blocks[: len(before)] == before
        assert len(seq.blocks) == len(before) + (max(0, missing) if possible else 0)
        self._took(seq.blocks[len(before) :])

    @rule(seq=sequences, count=st.integers(1, 6), commit=st.booleans())
    def compute(self, seq: Sequence, count: int, commit: bool) -> None:
        end = min(seq.num_computed + count, seq.num_tokens, len(seq.blocks) * BLOCK_SIZE)
        for index in range(end // BLOCK_SIZE):
            chain = (seq.root, tuple(seq.tokens[: (index + 1) * BLOCK_SIZE]))
            assert self.content.setdefault(seq.blocks[index], chain) == chain
        seq.num_computed = max(seq.num_computed, end)
        if commit:
            names = list(seq.names)
            self.kv.commit(seq)
            count = max(len(names), seq.num_computed // BLOCK_SIZE)  # the last one's may be known before
            assert seq.names == list(block_names(seq.root, seq.tokens[: count * BLOCK_SIZE], BLOCK_SIZE))

    @rule(seq=sequences, token=st.integers(0, 1))
    def generate(self, seq: Sequence, token: int) -> None:
        if seq.num_uncomputed == 0:
            seq.append(token)

    @rule(seq=sequences)
    def release(self, seq: Sequence) -> None:
        self._gave(seq.blocks)
        self.kv.release(seq)
        assert (seq.blocks, seq.names, seq.num_computed) == ([], [], 0)

    @rule(target=pins, seq=sequences)
    def pin(self, seq: Sequence) -> object:
        if not seq.blocks:
            return multiple()
        blocks = list(seq.blocks)
        self.kv.ref(blocks)
        self.holders.update(blocks)
        return tuple(blocks)

    @rule(target=pins, tokens=tokens_strategy)
    def pin_by_name(self, tokens: list[int]) -> object:
        blocks = self.kv.lookup(block_names(ROOTS[0], tokens, BLOCK_SIZE))
        for index, block in enumerate(blocks):
            assert self.content[block] == (ROOTS[0], tuple(tokens[: (index + 1) * BLOCK_SIZE]))
        self.kv.ref(blocks)
        self.holders.update(blocks)
        return tuple(blocks)

    @rule(blocks=consumes(pins))
    def unpin(self, blocks: tuple[int, ...]) -> None:
        before, available = self.notified, self.kv.available
        self.kv.unref(blocks)
        self._gave(list(blocks))
        assert (self.notified > before) == (self.kv.available > available)

    @rule()
    def free_blocks_cannot_be_pinned(self) -> None:
        if self.kv.free:
            with pytest.raises(ValueError, match="is free"):
                self.kv.ref(range(self.kv.total))

    @invariant()
    def blocks_add_up(self) -> None:
        kv = self.kv
        assert kv.free + kv.cached + kv.used == kv.total
        assert min(kv.free, kv.cached, kv.used) >= 0
        assert kv.used == sum(count > 0 for count in self.holders.values())

    @invariant()
    def names_are_what_events_said(self) -> None:
        for event in self.kv.take_events():
            assert event.stored != (event.name in self.known)
            (self.known.add if event.stored else self.known.remove)(event.name)
        names = self.kv.names()
        assert len(names) == len(set(names))
        assert set(names) == self.known
        assert self.kv.cached <= len(names) <= self.kv.cached + self.kv.used
        blocks = [self.kv.lookup([name])[0] for name in names]
        assert len(blocks) == len(set(blocks))


KvCacheMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
TestKvCacheMachine = KvCacheMachine.TestCase
