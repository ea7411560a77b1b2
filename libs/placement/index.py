"""Which worker holds which named block: one dictionary from name to a bit mask of holders.

    names     name -> 0b0101          holders 0 and 2
    holders   0: decode-1, 2: prefill-1, 3: (a listing that is still being read)
    live      0b0101                  bits that lookups see

A holder is one listing of one worker. Losing a worker, or replacing its listing, flips a bit of `live`: that costs
nothing however many names it held. Its bits are swept out of the dictionary later, piece by piece, so that the event
loop never waits for a million names. Masks are shared objects, so a name costs its 32 bytes and a dictionary slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat

_SLICE = 128  # names that a lookup judges together
MAX_SHARED_MASKS = 65_536  # combinations of holders that are kept as one object each


class BlockIndex:
    """Names of blocks and who holds them. Adding twice and removing what is not there are harmless."""

    def __init__(self) -> None:
        self._names: dict[bytes, int] = {}
        self._masks: dict[int, int] = {}  # every mask in use, once, so that equal ones share an object
        self._workers: dict[int, str] = {}  # published holder -> worker
        self._holder_of: dict[str, int] = {}
        self._counts: dict[int, int] = {}  # every open holder -> its names
        self._live = 0
        self._dead = 0  # retired holders whose bits are still in the dictionary
        self._sweep: _Sweep | None = None

    def __len__(self) -> int:
        """Distinct names in the dictionary, including those that only await the sweep."""
        return len(self._names)

    def open(self) -> int:
        """A new holder without names, which lookups do not see before `publish`."""
        used = self._dead
        for holder in self._counts:
            used |= 1 << holder
        holder = (~used & (used + 1)).bit_length() - 1  # lowest bit that nobody has
        self._counts[holder] = 0
        return holder

    def publish(self, holder: int, worker_id: str) -> None:
        """Makes `holder` the listing of `worker_id`, in place of the one it had."""
        self.drop(worker_id)
        self._holder_of[worker_id] = holder
        self._workers[holder] = worker_id
        self._live |= 1 << holder

    def retire(self, holder: int) -> None:
        """Forgets a holder and all that it holds. Its number is free again after the sweep."""
        count = self._counts.pop(holder)
        worker_id = self._workers.pop(holder, None)
        if worker_id is not None:
            del self._holder_of[worker_id]
        self._live &= ~(1 << holder)
        if count:
            self._dead |= 1 << holder

    def drop(self, worker_id: str) -> None:
        """Forgets a worker's listing, if it has one."""
        holder = self._holder_of.get(worker_id)
        if holder is not None:
            self.retire(holder)

    def holder_of(self, worker_id: str) -> int | None:
        return self._holder_of.get(worker_id)

    def add(self, holder: int, names: Iterable[bytes]) -> None:
        bit, masks, known = 1 << holder, self._shared_masks(), self._names
        added = 0
        for name in names:
            mask = known.get(name, 0)
            if not mask & bit:
                mask |= bit
                known[name] = masks.setdefault(mask, mask)
                added += 1
        self._counts[holder] += added

    def remove(self, holder: int, names: Iterable[bytes]) -> None:
        bit, masks, known = 1 << holder, self._shared_masks(), self._names
        removed = 0
        for name in names:
            mask = known.get(name, 0)
            if mask & bit:
                removed += 1
                mask &= ~bit
                if mask:
                    known[name] = masks.setdefault(mask, mask)
                else:
                    del known[name]
        self._counts[holder] -= removed

    def count(self, worker_id: str) -> int:
        """Names that a worker holds; 0 for one that has no listing."""
        holder = self._holder_of.get(worker_id)
        return 0 if holder is None else self._counts[holder]

    def runs(self, names: Sequence[bytes]) -> dict[str, int]:
        """For each worker that holds the first of `names`: how many of them it holds from there without a hole."""
        runs: dict[str, int] = {}
        known, alive = self._names, self._live
        if not alive:
            return runs
        for start in range(0, len(names), _SLICE):
            masks = list(map(known.get, names[start : start + _SLICE], repeat(0)))
            if all(mask & alive == alive for mask in set(masks)):
                continue  # nearly always: nobody's run ends here
            for position, mask in enumerate(masks, start):
                if mask & alive != alive:
                    if position:
                        runs.update((worker_id, position) for worker_id in self._named(alive & ~mask))
                    alive &= mask
                    if not alive:
                        return runs
        if names:
            runs.update((worker_id, len(names)) for worker_id in self._named(alive))
        return runs

    def sweep(self, max_names: int) -> bool:
        """Clears retired holders' bits from up to `max_names` names. True: call again, there are more."""
        if self._sweep is None:
            if not self._dead:
                return False
            self._sweep = _Sweep(bits=self._dead, names=iter(list(self._names)))
        bits, visited = self._sweep.bits, 0
        for name in islice(self._sweep.names, max_names):
            self._clear(name, bits)
            visited += 1
        if visited == max_names:
            return True
        self._dead &= ~bits
        self._sweep = None
        return bool(self._dead)

    def _shared_masks(self) -> dict[int, int]:
        if len(self._masks) > MAX_SHARED_MASKS:
            self._masks.clear()  # masks in use live on in the names; only the sharing starts over
        return self._masks

    def _clear(self, name: bytes, bits: int) -> None:
        mask = self._names.get(name, 0)
        if mask & bits:
            mask &= ~bits
            if mask:
                self._names[name] = self._masks.setdefault(mask, mask)
            else:
                del self._names[name]

    def _named(self, mask: int) -> Iterator[str]:
        while mask:
            low = mask & -mask
            yield self._workers[low.bit_length() - 1]
            mask ^= low


@dataclass(frozen=True, slots=True)
class _Sweep:
    """A pass over the names known at its start; names that came later have none of its bits."""

    bits: int
    names: Iterator[bytes]
