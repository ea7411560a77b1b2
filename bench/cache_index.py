"""How long the coordinator's indexes take to look up a prompt, what a block costs in memory, how fast news go in.

python -m bench.cache_index [--json] [--blocks 5000000] [--policy lru]
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, count, islice
from pathlib import Path

from libs.placement.index import BlockIndex
from libs.store.eviction import POLICIES, make_policy
from libs.store.index import DEFAULT_HIGH, StoreIndex
from libs.store.key import ObjectKey, block_key, namespace, tenant_tag

PROMPT_BLOCKS = 8192  # 128K tokens in blocks of 16
FILLER_BLOCKS = 1024
OBJECT_BLOCKS = 8
OBJECT_BYTES = 1 << 20
NUM_PROMPTS = 16
NEWS_OBJECTS = 32_000
NEWS_BATCH = 256  # objects between two looks at what has to go
NAMESPACE, TENANT = namespace("model", "layout"), tenant_tag("tenant")
REPEATS = 500


@dataclass(frozen=True, slots=True)
class Lookup:
    """Milliseconds for one whole prompt."""

    best_ms: float
    median_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """The index of what workers' pools hold."""

    num_blocks: int
    bytes_per_block: float
    runs: Lookup


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """The index of the durable store. Blocks per second: objects come one by one, as a listing or workers tell."""

    policy: str
    num_blocks: int
    bytes_per_block: float
    run: Lookup
    use: Lookup
    locate: Lookup
    listed_blocks_per_s: float
    added_blocks_per_s: float
    turned_over_blocks_per_s: float  # added while as many are evicted
    first_eviction_s: float  # in many calls: sets aside nearly all objects, which others continue
    longest_eviction_ms: float  # one call of `victims`
    rescan_s: float
    longest_rescan_step_ms: float  # `end_scan`


def measure_pools(num_blocks: int, num_workers: int = 8) -> PoolFigures:
    """Looks up a prompt that every worker holds to a different depth, among `num_blocks` other blocks."""
    index, before = BlockIndex(), _resident_bytes()
    prompt = _chain("prompt", PROMPT_BLOCKS)
    for number in range(num_workers):
        holder = index.open()
        index.add(holder, (os.urandom(32) for _ in range(num_blocks // num_workers)))
        index.add(holder, prompt[: PROMPT_BLOCKS * (number + 1) // num_workers])
        index.publish(holder, f"worker-{number}")
    bytes_per_block = (_resident_bytes() - before) / len(index)
    runs = _lookup(lambda names: max(index.runs(names).values()), [prompt])
    return PoolFigures(len(index), bytes_per_block, runs)


def measure_store(num_blocks: int, policy: str) -> StoreFigures:
    """An index of `num_blocks` blocks: prompts of 128K tokens, which are looked up, and shorter ones."""
    prompts = [_chain(f"prompt {number}", PROMPT_BLOCKS) for number in range(NUM_PROMPTS)]
    index, before = StoreIndex(make_policy(policy), capacity_bytes=1 << 60), _resident_bytes()
    listed_s, _ = _list(index, _listing(prompts, num_blocks))
    gc.collect()
    held, bytes_per_block = index.num_blocks, (_resident_bytes() - before) / index.num_blocks
    run = _lookup(index.run, prompts)
    use = _lookup(lambda names: index.use(names, time.time()), prompts)
    locate = _lookup(lambda names: sum(each.count for each in index.locate(names)), prompts)
    rescan_s, step_s = _list(index, _listing(prompts, num_blocks))
    added_s, _ = _add(index, _listing([], NEWS_OBJECTS * OBJECT_BLOCKS, "news"))
    first_s, first_call_s = _evict(index)
    turned_over_s, later_call_s = _add(index, _listing([], NEWS_OBJECTS * OBJECT_BLOCKS, "more news"))
    return StoreFigures(
        policy=policy,
        num_blocks=held,
        bytes_per_block=bytes_per_block,
        run=run,
        use=use,
        locate=locate,
        listed_blocks_per_s=held / listed_s,
        added_blocks_per_s=NEWS_OBJECTS * OBJECT_BLOCKS / added_s,
        turned_over_blocks_per_s=NEWS_OBJECTS * OBJECT_BLOCKS / turned_over_s,
        first_eviction_s=first_s,
        longest_eviction_ms=1e3 * max(first_call_s, later_call_s),
        rescan_s=rescan_s,
        longest_rescan_step_ms=1e3 * step_s,
    )


def _listing(prompts: Iterable[Sequence[bytes]], num_blocks: int, label: str = "filler") -> Iterator[str]:
    """Paths of objects with `num_blocks` blocks in all, made as they are asked for."""
    fillers = (_chain(f"{label} {number}", FILLER_BLOCKS) for number in count())
    paths = (path for names in chain(prompts, fillers) for path in _paths(names))
    return islice(paths, num_blocks // OBJECT_BLOCKS)


def _paths(names: Sequence[bytes]) -> Iterator[str]:
    keys = [bytes(10), *map(block_key, names)]
    for first in range(1, len(keys), OBJECT_BLOCKS):
        blocks = tuple(keys[first : first + OBJECT_BLOCKS])
        yield ObjectKey(NAMESPACE, TENANT, keys[first - 1], blocks).path()


def _list(index: StoreIndex, paths: Iterable[str]) -> tuple[float, float]:
    """Seconds that the index needs for a listing, and for the step at its end. Making the paths does not count."""
    spent_s = 0.0
    index.begin_scan()
    for number, path in enumerate(paths):
        start_s = time.perf_counter()
        index.seen(path, OBJECT_BYTES, 1e9 + number * 7919 % 1_000_003)
        spent_s += time.perf_counter() - start_s
    start_s = time.perf_counter()
    index.end_scan()
    end_s = time.perf_counter() - start_s
    return spent_s + end_s, end_s


def _evict(index: StoreIndex) -> tuple[float, float]:
    """Seconds from a store that is suddenly full to one that is not, and for the longest call on that way."""
    index.capacity_bytes = index.num_bytes
    spent_s, longest_s = 0.0, 0.0
    while index.num_bytes > DEFAULT_HIGH * index.capacity_bytes:
        start_s = time.perf_counter()
        victims = index.victims(time.time())
        longest_s = max(longest_s, time.perf_counter() - start_s)
        for path in victims:
            index.remove(path)
        spent_s += time.perf_counter() - start_s
    return spent_s, longest_s


def _add(index: StoreIndex, paths: Iterable[str]) -> tuple[float, float]:
    """Seconds for objects that are added one by one, with what has to go for them; and for the longest eviction."""
    listed, spent_s, longest_s = list(paths), 0.0, 0.0
    for first in range(0, len(listed), NEWS_BATCH):
        start_s = time.perf_counter()
        for path in listed[first : first + NEWS_BATCH]:
            index.add(path, OBJECT_BYTES, time.time())
        added_s = time.perf_counter()
        victims = index.victims(time.time())
        longest_s = max(longest_s, time.perf_counter() - added_s)
        for path in victims:
            index.remove(path)
        spent_s += time.perf_counter() - start_s
    return spent_s, longest_s


def _lookup(look_up: Callable[[Sequence[bytes]], int], prompts: Sequence[Sequence[bytes]]) -> Lookup:
    """Times lookups of whole prompts, one after the other.

    The names looked up are fresh objects each time, as they are when they come off the wire.
    """
    times_ms = []
    for number in range(REPEATS):
        asked = [bytes(bytearray(name)) for name in prompts[number % len(prompts)]]
        start_s = time.perf_counter()
        found = look_up(asked)
        times_ms.append(1e3 * (time.perf_counter() - start_s))
        assert found == PROMPT_BLOCKS
    times_ms.sort()
    return Lookup(times_ms[0], times_ms[REPEATS // 2], times_ms[REPEATS * 99 // 100])


def _chain(label: str, num_blocks: int) -> list[bytes]:
    return [hashlib.sha256(f"{label} {number}".encode()).digest() for number in range(num_blocks)]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _table(pools: PoolFigures, store: StoreFigures) -> str:
    def line(label: str, lookup: Lookup) -> str:
        return f"{label:26}{lookup.best_ms:8.2f}{lookup.median_ms:8.2f}{lookup.p99_ms:8.2f} ms"

    return "\n".join(
        (
            f"{f'prompt of {PROMPT_BLOCKS} blocks':26}{'best':>8}{'median':>8}{'p99':>8}",
            line("pools: run of each worker", pools.runs),
            line("store: run", store.run),
            line("store: use", store.use),
            line("store: locate", store.locate),
            f"pools: {pools.num_blocks} blocks, {pools.bytes_per_block:.0f} bytes each",
            f"store: {store.num_blocks} blocks, {store.bytes_per_block:.0f} bytes each, policy {store.policy}",
            f"       {store.listed_blocks_per_s:,.0f} blocks/s of a listing, {store.added_blocks_per_s:,.0f} of news,"
            f" {store.turned_over_blocks_per_s:,.0f} of news to a full store",
            f"       listing it anew {store.rescan_s:.2f} s, its last step {store.longest_rescan_step_ms:.0f} ms;"
            f" first eviction {store.first_eviction_s:.1f} s, longest step {store.longest_eviction_ms:.0f} ms",
        )
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", dest="as_json")
    parser.add_argument("--blocks", type=int, default=5_000_000)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="lru")
    options = parser.parse_args(arguments)
    store = measure_store(options.blocks, options.policy)
    gc.collect()
    pools = measure_pools(options.blocks)
    if options.as_json:
        print(json.dumps({"pools": asdict(pools), "store": asdict(store)}, indent=2))
    else:
        print(_table(pools, store))


if __name__ == "__main__":
    main(sys.argv[1:])
