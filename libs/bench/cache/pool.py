"""One node's own KV pool: named blocks, least recently used out first, as `libs.engine.kv.cache` keeps them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from libs.placement.index import BlockIndex


class NodePool:
    """`num_blocks` blocks; what comes and goes is told to the coordinator's index, as a worker's events do."""

    def __init__(self, node: str, num_blocks: int, index: BlockIndex) -> None:
        self._index = index
        self._num_blocks = num_blocks
        self._names: OrderedDict[bytes, None] = OrderedDict()  # next to evict first
        self._holder = index.open()
        index.publish(self._holder, node)

    def __len__(self) -> int:
        return len(self._names)

    def hold(self, names: Sequence[bytes]) -> None:
        """A request has used these blocks, a whole chain: they are here now, the first of them for longest."""
        known = self._names
        names = names[: self._num_blocks]
        self._index.add(self._holder, [name for name in names if name not in known])
        for name in reversed(names):
            known[name] = None
            known.move_to_end(name)
        surplus = len(known) - self._num_blocks
        if surplus > 0:
            gone = list(islice(known, surplus))
            for name in gone:
                del known[name]
            self._index.remove(self._holder, gone)
