"""Who owns which block of a KV pool, and which named blocks can be found again.

Every block is in one of three states, and free + cached + used == total at all times:

    free    nobody refers to it and its bytes mean nothing
    used    refcount > 0: sequences and leases hold it; it may have a name
    cached  refcount 0 and a name: found by the next prompt that starts alike, evicted when blocks run short

A block gets its name when all its tokens are computed, so a block that is being written is never found. Only
ids are kept here; the bytes are `KvPool`'s. Not thread-safe: the event loop's thread does all bookkeeping.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from libs.engine.kv.names import child_name
from libs.engine.sequence import Sequence
from libs.wire.messages import BlockEvent

DEFAULT_MAX_EVENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a named block holds; compared on a hit, so even colliding names give no foreign KV."""

    name: bytes
    parent: bytes
    tokens: tuple[int, ...]


class KvCache:
    """Bookkeeping of `num_blocks` blocks of `block_size` tokens; operations cost O(blocks they touch)."""

    def __init__(self, num_blocks: int, block_size: int, *, max_events: int = DEFAULT_MAX_EVENTS) -> None:
        if num_blocks < 1 or block_size < 1 or max_events < 1:
            raise ValueError(f"num_blocks={num_blocks}, block_size={block_size}, max_events={max_events}")
        self.total = num_blocks
        self.block_size = block_size
        self.most_taken = 0  # blocks that were used or cached at once, ever
        self.num_events = 0  # block events ever made; the next one has this number
        self._refs = [0] * num_blocks
        self._entries: list[_Entry | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._lru: OrderedDict[int, None] = OrderedDict()  # cached blocks, next to evict first
        self._events: deque[BlockEvent] = deque(maxlen=max_events)
        self._on_free: list[Callable[[], None]] = []
        self._on_named: list[Callable[[Sequence, list[int]], None]] = []

    # ------------------------------------------------------------ counts

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._lru)

    @property
    def used(self) -> int:
        return self.total - self.free - self.cached

    @property
    def available(self) -> int:
        """Blocks that can be had now: free, or cached and evicted for it."""
        return self.free + self.cached

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------ sequences

    def admit(self, seq: Sequence) -> int:
        """Gives a sequence without blocks the longest known prefix; returns its length in tokens.

        The last token is left to compute, whose logits the next token is drawn from. Where its KV is known too, because
        the tokens end with a block, the step writes the same bits over it: docs/adr/0006-durable-kv-store.md.
        Raises ValueError if the sequence holds blocks.
        """
        if seq.blocks:
            raise ValueError(f"{seq.request_id} already holds {len(seq.blocks)} blocks")
        blocks, names = self._match(seq)
        self._take_prefix(seq, blocks, names)
        return seq.num_computed

    def reserve(self, seq: Sequence, *, keep_available: int = 0) -> bool:
        """Gives `seq` its known prefix and room for all its tokens, or nothing.

        False, with nothing changed, if it takes blocks and would leave fewer than `keep_available` of them. A
        sequence that has blocks keeps them and gets only what is missing.
        """
        blocks, names = ([], []) if seq.blocks else self._match(seq)
        missing = max(0, self.blocks_for(seq.num_tokens) - len(seq.blocks) - len(blocks))
        revived = sum(self._refs[block] == 0 for block in blocks)
        if missing + revived and missing + revived + keep_available > self.available:
            return False
        if blocks:
            self._take_prefix(seq, blocks, names)
        return self.grow(seq, seq.num_tokens)

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens in all, evicting cached blocks; all or nothing."""
        missing = self.blocks_for(num_tokens) - len(seq.blocks)
        if missing > self.available:
            return False
        for _ in range(missing):
            block = self._free.pop() if self._free else self._evict()
            self._refs[block] = 1
            seq.blocks.append(block)
        self.most_taken = max(self.most_taken, self.total - self.free)
        return True

    def commit(self, seq: Sequence) -> None:
        """Names the blocks that `seq.num_computed` has filled since the last commit.

        A block whose name another block has already stays anonymous, and is free once released.
        """
        size, fresh = self.block_size, list[int]()
        while len(seq.names) < seq.num_computed // size:
            index = len(seq.names)
            tokens = tuple(seq.tokens[index * size : (index + 1) * size])
            parent = seq.names[-1] if seq.names else seq.root
            entry = _Entry(child_name(parent, tokens), parent, tokens)
            owner = self._block_of.get(entry.name)
            if owner is None:
                self._register(seq.blocks[index], entry)
                fresh.append(index)
            elif self._entries[owner] != entry:
                break  # a collision: what follows would be found under the wrong prefix
            seq.names.append(entry.name)
        if fresh:
            for callback in self._on_named:
                callback(seq, fresh)

    def release(self, seq: Sequence) -> None:
        """Takes all blocks from `seq`; its KV counts as not computed. Idempotent."""
        blocks, names = seq.blocks, seq.names
        seq.blocks, seq.names, seq.num_computed = [], [], 0
        freed = False
        for index in range(len(blocks) - 1, -1, -1):
            freed |= self._unref(blocks[index])
            if index < len(names):
                self._touch(names[index])
        if freed:
            self.notify()

    # ------------------------------------------------------------ blocks

    def lookup(self, names: Iterable[bytes]) -> list[int]:
        """Blocks of the longest run of `names`, from the first on, that are here. Takes no reference."""
        found: list[int] = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def ref(self, blocks: Iterable[int]) -> None:
        """Holds blocks that are used or cached. Raises ValueError, with nothing held, if one is free."""
        blocks = tuple(blocks)
        for block in blocks:
            if self._refs[block] == 0 and self._entries[block] is None:
                raise ValueError(f"block {block} is free")
        for block in blocks:
            self._ref(block)

    def unref(self, blocks: Iterable[int]) -> None:
        """Gives up one reference to each block. Raises ValueError at a block that nobody holds."""
        freed = False
        for block in reversed(tuple(blocks)):
            if self._refs[block] == 0:
                raise ValueError(f"block {block} is not held")
            freed |= self._unref(block)
        if freed:
            self.notify()

    def find(self, name: bytes) -> int | None:
        """The block of this name. Takes no reference."""
        return self._block_of.get(name)

    def on_named(self, callback: Callable[[Sequence, list[int]], None]) -> None:
        """Calls `callback(seq, indices)` when these blocks of a sequence have got names that no other block had."""
        self._on_named.append(callback)

    def on_free(self, callback: Callable[[], None]) -> None:
        """Calls `callback()` whenever blocks become available. It must only note the fact (set an event)."""
        self._on_free.append(callback)

    def notify(self) -> None:
        """Tells those who wait for blocks to try again."""
        for callback in self._on_free:
            callback()

    # ------------------------------------------------------------ names and their events

    def names(self) -> list[bytes]:
        """All names held now, oldest first: the truth that events are only news of."""
        return list(self._block_of)

    def take_events(self) -> list[BlockEvent]:
        """Events since the last call, numbered up to `num_events - 1`.

        The outbox is bounded and drops its oldest: a reader sees it as a gap in the numbers, and asks for names().
        """
        events = list(self._events)
        self._events.clear()
        return events

    # ------------------------------------------------------------ inside

    def _match(self, seq: Sequence) -> tuple[list[int], list[bytes]]:
        """Blocks and names of the longest known prefix."""
        blocks: list[int] = []
        names: list[bytes] = []
        parent = seq.root
        for index in range(seq.num_tokens // self.block_size):
            tokens = tuple(seq.tokens[index * self.block_size : (index + 1) * self.block_size])
            name = child_name(parent, tokens)
            block = self._block_of.get(name)
            if block is None or self._entries[block] != _Entry(name, parent, tokens):
                break
            blocks.append(block)
            names.append(name)
            parent = name
        return blocks, names

    def _take_prefix(self, seq: Sequence, blocks: list[int], names: list[bytes]) -> None:
        for block in blocks:
            self._ref(block)
        seq.blocks, seq.names = blocks, names
        seq.num_computed = min(len(blocks) * self.block_size, seq.num_tokens - 1)
        seq.num_cached = min(seq.num_computed, seq.num_prompt_tokens)
        seq.num_from_peer = seq.num_from_store = 0

    def _register(self, block: int, entry: _Entry) -> None:
        self._entries[block] = entry
        self._block_of[entry.name] = block
        self._event(BlockEvent(stored=True, name=entry.name))

    def _evict(self) -> int:
        """The least recently used cached block, without its name."""
        block, _ = self._lru.popitem(last=False)
        entry = self._entries[block]
        assert entry is not None  # only named blocks are in the LRU
        self._entries[block] = None
        del self._block_of[entry.name]
        self._event(BlockEvent(stored=False, name=entry.name))
        return block

    def _touch(self, name: bytes) -> None:
        """A duplicate of this cached block was just in use: keeps parents younger than their children."""
        block = self._block_of.get(name)
        if block is not None and block in self._lru:
            self._lru.move_to_end(block)

    def _ref(self, block: int) -> None:
        if self._refs[block] == 0:
            del self._lru[block]
        self._refs[block] += 1

    def _unref(self, block: int) -> bool:
        """True if nobody holds the block any more. Callers go from tail to head, so tails are evicted first."""
        self._refs[block] -= 1
        if self._refs[block]:
            return False
        if self._entries[block] is None:
            self._free.append(block)
        else:
            self._lru[block] = None
        return True

    def _event(self, event: BlockEvent) -> None:
        self._events.append(event)
        self.num_events += 1
