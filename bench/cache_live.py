"""A public trace, scaled down to the small model, through live services; beside it what the replay predicts.

python -m bench.cache_live --trace sessions_rle.jsonl.gz --sessions 8 --requests 300

Lengths are divided by 16, and tokens are made from the trace's block numbers: four for each of its blocks of 64
tokens, so four of its blocks are one KV block of 16. Requests go to `baton up` one after the other, in the trace's
order, and draw one token. The hit rate that `usage` reports is compared with that of the replay of the same requests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.live import Up, baton_up
from bench.peers.options import threads_of
from libs.bench.cache.arrivals import arrivals
from libs.bench.cache.naming import BlockNames
from libs.bench.cache.options import ReplayOptions
from libs.bench.cache.reading import read_trace
from libs.bench.cache.replay import Replay
from libs.bench.cache.trace import Request, Runs, Session, Trace, to_runs
from libs.wire.errors import BatonError

_SCALE, _BLOCK = 16, 16  # tokens of a KV block
_GROUP = 4  # blocks of the trace in a KV block
_TOKEN_IDS = (1000, 20000)
_MOST_TOKENS = 8000  # of the model's 8192
_POOL_MIB, _ANSWER_S = 512, 300.0
_TOKENS_PER_MIB = (1 << 20) // 23_040  # f16 KV of SmolLM2-135M


@dataclass(frozen=True, slots=True)
class Scaled:
    """A trace in KV blocks, and the token ids of its requests by session and number."""

    trace: Trace
    prompts: dict[tuple[int, int], list[int]]


def scale(trace: Trace, num_sessions: int, num_requests: int) -> Scaled:
    """The first sessions, `num_requests` in all, each from its start."""
    prompts: dict[tuple[int, int], list[int]] = {}
    numbers: dict[tuple[int, ...], int] = {}
    each_share = -(-num_requests // num_sessions)
    sessions = []
    for number, session in enumerate(trace.sessions[:num_sessions]):
        requests = []
        for at, request in enumerate(session.requests[:each_share]):
            blocks = _flat(request.blocks)
            length = max(2, min(_MOST_TOKENS, request.num_tokens // _SCALE))
            prompts[number, at] = _prompt(session.scope, blocks, length, f"{number} {at}")
            full = min(length, _GROUP * len(blocks)) // _BLOCK
            groups = (tuple(blocks[i * _GROUP : (i + 1) * _GROUP]) for i in range(full))
            runs = to_runs([numbers.setdefault(group, len(numbers) * 2) for group in groups])
            requests.append(replace(request, num_tokens=length, blocks=runs, published=runs))
        sessions.append(Session(session.scope, tuple(requests)))
    return Scaled(Trace(trace.name, _BLOCK, tuple(sessions), trace.has_own_times), prompts)


def live(up: Up, scaled: Scaled, num_slots: int) -> Iterator[tuple[Request, dict[str, Any]]]:
    """Each request, and where its prompt came from."""
    counts: dict[int, int] = {}
    for arrival in arrivals(scaled.trace, num_slots):
        at = counts.get(arrival.session, 0)
        counts[arrival.session] = at + 1
        yield arrival.request, _ask(up, scaled.prompts[arrival.session, at])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE")
    parser.add_argument("--sessions", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=300, metavar="N", help="default: %(default)s")
    parser.add_argument("--threads", type=int, metavar="N", help="of each worker (default: all CPUs)")
    arguments = parser.parse_args()
    scaled = scale(read_trace(arguments.trace), arguments.sessions, arguments.requests)
    predicted = _predict(scaled, arguments.sessions)
    tokens = {"all": 0, "own_pool": 0, "peer": 0, "store": 0, "cached": 0}
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="baton-live-") as name,
        baton_up(Path(name), threads_of(arguments), "--kv-cache-mib", _POOL_MIB) as up,
    ):
        for number, (request, details) in enumerate(live(up, scaled, arguments.sessions), 1):
            tokens["all"] += request.num_tokens
            tokens["cached"] += details["cached_tokens"]
            for tier in ("own_pool", "peer", "store"):
                tokens[tier] += details["baton_cache"][tier]
            if number % 20 == 0:
                print(f"bench: {number} of {scaled.trace.num_requests} requests", file=sys.stderr, flush=True)
    found = 100 * tokens["cached"] / tokens["all"]
    report = {
        "requests": scaled.trace.num_requests,
        "tokens": tokens,
        "predicted_percent": round(predicted, 2),
        "live_percent": round(found, 2),
        "difference": round(found - predicted, 2),
        "seconds": round(time.monotonic() - began_s),
    }
    print(json.dumps(report, indent=2))
    return 0


def _predict(scaled: Scaled, num_slots: int) -> float:
    """Percent of input tokens that the replay finds cached, on one node with the same pool."""
    options = ReplayOptions(
        Path(scaled.trace.name), (1,), nodes=1, sessions=num_slots, pool_tokens=_POOL_MIB * _TOKENS_PER_MIB
    )
    result = Replay(scaled.trace, BlockNames(), options, "lru", 64_000_000).run()
    return 100 * (result.own + result.peer + result.store) / result.total


def _flat(runs: Runs) -> list[int]:
    return [first + index for first, length in runs for index in range(length)]


def _prompt(scope: str, blocks: list[int], length: int, own: str) -> list[int]:
    """Tokens of the blocks; behind them, up to `length`, tokens that no other request has."""
    tokens: list[int] = []
    for block in blocks:
        if len(tokens) >= length:
            break
        tokens += _tokens(f"{scope} {block}", _GROUP)
    return (tokens + _tokens(own, max(0, length - len(tokens))))[:length]


def _tokens(seed: str, count: int) -> list[int]:
    data = hashlib.shake_128(seed.encode()).digest(4 * count)
    low, high = _TOKEN_IDS
    return [low + int.from_bytes(data[4 * i : 4 * i + 4], "little") % (high - low) for i in range(count)]


def _ask(up: Up, prompt: list[int]) -> dict[str, Any]:
    body = {"model": up.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"{up.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_ANSWER_S) as response:
        details: dict[str, Any] = json.load(response)["usage"]["prompt_tokens_details"]
        return details


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BatonError as error:
        sys.exit(f"bench: {error.message}")
