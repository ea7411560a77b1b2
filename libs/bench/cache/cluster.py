"""Nodes, store and coordinator of a replay: the real indexes, placement and load accounting; no bytes, no model.

A node is a prefill and a decode worker with one pool. What a request publishes counts as there as soon as it is placed:
a replay measures what caches hold, not who wins a race.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from libs.bench.cache.pool import NodePool
from libs.placement.index import BlockIndex
from libs.placement.load import InFlight, Share
from libs.placement.policy import Policy
from libs.placement.view import Prompt, Worker
from libs.store.index import StoreIndex
from libs.store.key import ObjectKey, block_key, namespace, tenant_tag
from libs.wire.messages import Placement, Role

OBJECT_BLOCKS = 8
FOREVER_S = 1e12


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `names` of its input's full blocks; `published`: these and those of its answer that are known.

    `root` is the parent of the first block. `avoid` names a node that may not take it; "": none.
    """

    request_id: str
    num_tokens: int
    root: bytes
    names: Sequence[bytes]
    published: Sequence[bytes]
    now_s: float
    busy_s: float
    avoid: str = ""


@dataclass(frozen=True, slots=True)
class Served:
    """Where a request was computed, and where the KV of its blocks came from."""

    node: str
    own_blocks: int
    peer_blocks: int
    store_blocks: int

    @property
    def hit_blocks(self) -> int:
        return self.own_blocks + self.peer_blocks + self.store_blocks


class Cluster:
    """Pools in blocks. In the store, a token counts as one byte."""

    def __init__(
        self, store: StoreIndex, policy: Policy, *, num_nodes: int, pool_blocks: int, block_size: int
    ) -> None:
        self.store = store
        self.evicted_objects = 0
        self.evicted_tokens = 0
        self._policy = policy
        self._block_size = block_size
        self._pool_blocks = pool_blocks
        self._index = BlockIndex()
        self._load = InFlight(settle_s=0.0, expire_s=FOREVER_S)
        self._ends: list[tuple[float, str]] = []  # of requests in flight, the next to end first
        self._namespace, self._tenant = namespace("replay", "replay"), tenant_tag("replay")
        self.nodes = tuple(f"node-{number}" for number in range(num_nodes))
        self._pools = {node: NodePool(node, pool_blocks, self._index) for node in self.nodes}

    def serve(self, ask: Ask) -> Served:
        """Places the request, counts its hits, and keeps its blocks as the workers would."""
        while self._ends and self._ends[0][0] <= ask.now_s:
            ended_s, request_id = heapq.heappop(self._ends)
            self._load.end(request_id, ended_s)
            self._load.expire(ended_s)  # only forgets what ended long ago
        prompt = Prompt(num_tokens=ask.num_tokens, store_blocks=self.store.use(ask.names, ask.now_s))
        workers = self._workers(self._index.runs(ask.names), ask.avoid)
        placement = self._policy.place(prompt, list(workers.values()))
        assert placement is not None  # at least one node takes requests
        decode = workers[placement.decode]
        computing = decode if placement.prefill is None else workers[placement.prefill]
        served = self._served(placement, computing, (ask.num_tokens - 1) // self._block_size)
        self._dispatch(ask, decode, computing, served)
        for node in {_node(computing), _node(decode)}:
            self._pools[node].hold(ask.published if node == _node(decode) else ask.names)
        self._write(ask, prompt.store_blocks)
        return served

    def _workers(self, runs: Mapping[str, int], avoid: str) -> dict[str, Worker]:
        roles: tuple[Role, ...] = ("prefill", "decode")
        workers = (
            self._worker(node, role, runs.get(node, 0), avoid) for node in self.nodes for role in roles
        )
        return {worker.worker_id: worker for worker in workers}

    def _worker(self, node: str, role: Role, hit_blocks: int, avoid: str) -> Worker:
        worker_id = f"{node}/{role}"
        standing = self._load.of(worker_id)
        return Worker(
            worker_id=worker_id,
            role=role,
            block_size=self._block_size,
            hit_blocks=hit_blocks,
            requests=standing.requests,
            queued_tokens=standing.queued_tokens,
            blocks_used=standing.blocks_used,
            blocks_total=self._pool_blocks,
            draining=node == avoid,  # it takes no request, but its blocks can be had
            last_chosen=standing.last_chosen,
        )

    def _served(self, placement: Placement, computing: Worker, most_blocks: int) -> Served:
        """Own blocks first, then a peer's, then the store's. `most_blocks` leave the last token to compute."""
        sources = placement.decode_sources if placement.prefill is None else placement.prefill_sources
        own = min(computing.hit_blocks, most_blocks)
        peer = min(max([own, *(source.num_blocks for source in sources)]), most_blocks)
        store = min(max(peer, placement.store_blocks), most_blocks)
        return Served(_node(computing), own, peer - own, store - peer)

    def _dispatch(self, ask: Ask, decode: Worker, computing: Worker, served: Served) -> None:
        """Counts the request's load until its answer is complete."""
        blocks = -(-ask.num_tokens // self._block_size)
        missing = ask.num_tokens - served.hit_blocks * self._block_size
        shares = {decode.worker_id: Share(tokens=0, blocks=blocks)}
        shares[computing.worker_id] = Share(tokens=missing, blocks=blocks)
        self._load.dispatch(ask.request_id, shares, ask.now_s)
        heapq.heappush(self._ends, (ask.now_s + ask.busy_s, ask.request_id))

    def _write(self, ask: Ask, held: int) -> None:
        """Writes what the store lacks of the chain, of whose input it holds `held` blocks; deletes for want of room."""
        names = ask.published
        start = held if held < len(ask.names) else self.store.run(names)
        for first in range(start, len(names), OBJECT_BLOCKS):
            part = names[first : first + OBJECT_BLOCKS]
            parent = names[first - 1] if first else ask.root
            key = ObjectKey(self._namespace, self._tenant, block_key(parent), tuple(map(block_key, part)))
            self.store.add(key.path(), len(part) * self._block_size, ask.now_s)
        num_bytes = self.store.num_bytes
        while victims := self.store.victims(ask.now_s):
            self.evicted_objects += len(victims)
            for path in victims:
                self.store.remove(path)
        self.evicted_tokens += num_bytes - self.store.num_bytes


def _node(worker: Worker) -> str:
    return worker.worker_id.partition("/")[0]
