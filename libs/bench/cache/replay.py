"""`baton bench cache`: a public trace through the real index, eviction, placement and load accounting."""

from __future__ import annotations

import sys
import time
from random import Random

from libs.bench.cache.arrivals import Arrival, arrivals
from libs.bench.cache.cluster import Ask, Cluster, Served
from libs.bench.cache.infinite import InfiniteCache
from libs.bench.cache.naming import BlockNames
from libs.bench.cache.options import ReplayOptions
from libs.bench.cache.reading import read_trace
from libs.bench.cache.result import Report, Result, tokens
from libs.bench.cache.trace import Trace
from libs.placement.policy import LongestPrefix
from libs.store.eviction import make_policy
from libs.store.index import StoreIndex

LOCAL_PREFILL_TOKENS = 64  # as in the services' settings
_SAY_EACH = 5_000  # requests


def run(options: ReplayOptions) -> int:
    """Replays and prints. Raises TraceError."""
    report = measure(options)
    print(report.to_json() if options.as_json else report.table())
    return 0


def measure(options: ReplayOptions) -> Report:
    """One replay for each policy and capacity."""
    trace, names = read_trace(options.trace), BlockNames()
    results = [
        Replay(trace, names, options, policy, capacity).run()
        for policy in options.policies
        for capacity in options.capacities
    ]
    return Report(trace, options, results)


class Replay:
    """One pass over a trace. `names` may be shared with others of the same trace."""

    def __init__(
        self, trace: Trace, names: BlockNames, options: ReplayOptions, policy: str, capacity: int
    ) -> None:
        self._trace = trace
        self._names = names
        self._options = options
        self._policy = policy
        self._capacity = capacity
        self._random = Random(options.seed)
        self._infinite = InfiniteCache()
        self._cluster = Cluster(
            StoreIndex(make_policy(policy), capacity_bytes=capacity),
            LongestPrefix(local_prefill_tokens=LOCAL_PREFILL_TOKENS),
            num_nodes=options.nodes,
            pool_blocks=max(1, options.pool_tokens // trace.block_size),
            block_size=trace.block_size,
        )
        self._last_node: dict[int, str] = {}  # by session
        self._uncached = dict.fromkeys(self._cluster.nodes, 0)
        self._own = self._peer = self._store = self._optimum = self._moved = 0  # blocks, requests

    def run(self) -> Result:
        start_s = time.perf_counter()
        for number, arrival in enumerate(arrivals(self._trace, self._options.sessions), 1):
            self._serve(f"request-{number}", arrival)
            if number % _SAY_EACH == 0:
                self._say(f"{number} of {self._trace.num_requests} requests")
        size = self._trace.block_size
        return Result(
            policy=self._policy,
            capacity=self._capacity,
            own=self._own * size,
            peer=self._peer * size,
            store=self._store * size,
            optimum=self._optimum * size,
            total=self._trace.num_tokens,
            uncached=self._uncached,
            moved_requests=self._moved,
            evicted=self._cluster.evicted_tokens,
            evicted_objects=self._cluster.evicted_objects,
            seconds=time.perf_counter() - start_s,
        )

    def _serve(self, request_id: str, arrival: Arrival) -> None:
        request, scope = arrival.request, self._trace.sessions[arrival.session].scope
        names = self._names.of(scope, request.blocks)
        published = self._names.of(scope, request.published) if self._options.outputs else names
        ask = Ask(
            request_id=request_id,
            num_tokens=request.num_tokens,
            root=self._names.root(scope),
            names=names,
            published=published,
            now_s=arrival.now_s,
            busy_s=request.busy_s,
            avoid=self._avoid(arrival.session),
        )
        served = self._cluster.serve(ask)
        most_blocks = (request.num_tokens - 1) // self._trace.block_size
        self._optimum += self._infinite.serve(names, published, most_blocks)
        self._count(arrival, served)

    def _avoid(self, session: int) -> str:
        """The node that a request of this session may not go to; "" nearly always."""
        last = self._last_node.get(session, "")
        if not last or self._options.nodes == 1 or self._random.random() >= self._options.move:
            return ""
        self._moved += 1
        return last

    def _count(self, arrival: Arrival, served: Served) -> None:
        self._last_node[arrival.session] = served.node
        self._own += served.own_blocks
        self._peer += served.peer_blocks
        self._store += served.store_blocks
        missing = arrival.request.num_tokens - served.hit_blocks * self._trace.block_size
        self._uncached[served.node] += missing

    def _say(self, text: str) -> None:
        line = f"bench: {self._policy}, store of {tokens(self._capacity)}: {text}"
        print(line, file=sys.stderr, flush=True)
