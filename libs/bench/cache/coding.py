"""kv-cache-tester's coding-agent sessions (Apache-2.0), packed: one session a line, gzip.

    {"block_size": 64, "requests": [
        {"t": 19.0, "in": 72762, "out": 296, "hash_ids": [[1, 1136]], "api_time": 9.19, ...},
        {"t": 134.2, "requests": [...]}, ...]}            a subagent; its times are from its own start

Each session is cut at its first input over `MOST_TOKENS`, in the order of time; one of which a single request is left
tells nothing about a cache and is left out. So are the figures made that are published with the trace.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from libs.bench.cache.trace import Request, Runs, Session, Trace, TraceError, count, head

MOST_TOKENS = 131_072


def read(path: Path) -> Trace:
    """Raises TraceError, naming the line."""
    sessions: list[Session] = []
    sizes: set[int] = set()
    number = 0
    try:
        with gzip.open(path, "rt") as lines:
            for line in lines:
                number += 1
                document = json.loads(line)
                sizes.add(int(document["block_size"]))
                requests = _requests(document["requests"], int(document["block_size"]))
                if len(requests) > 1:
                    sessions.append(Session(str(document["id"]), requests))
    except (KeyError, TypeError, ValueError, EOFError, OSError, zlib.error) as error:
        raise TraceError(f"{path}, line {number}: {error!r}") from error
    if len(sizes) != 1 or not sessions:
        raise TraceError(f"{path}: {len(sessions)} sessions with blocks of {sorted(sizes)} tokens")
    return Trace(path.name, sizes.pop(), tuple(sessions), has_own_times=False)


def _requests(documents: list[dict[str, Any]], block_size: int) -> tuple[Request, ...]:
    """Of a session and all its subagents, by time, up to the first that is too long."""
    found: list[Request] = []
    for agent in _agents(documents, 0.0):
        found += (_request(agent, at, block_size) for at in range(len(agent)))
    found.sort(key=lambda request: request.at_s)  # stable: in the file's order where times are equal
    too_long = (at for at, request in enumerate(found) if request.num_tokens > MOST_TOKENS)
    return tuple(found[: next(too_long, len(found))])


def _agents(documents: list[dict[str, Any]], start_s: float) -> Iterator[list[dict[str, Any]]]:
    """Requests of each agent, the session's own first, with times from the session's start."""
    yield [{**each, "t": start_s + each["t"]} for each in documents if "requests" not in each]
    for each in documents:
        if "requests" in each:
            yield from _agents(each["requests"], start_s + each["t"])


def _request(agent: list[dict[str, Any]], at: int, block_size: int) -> Request:
    document = agent[at]
    num_tokens, num_blocks = int(document["in"]), (int(document["in"]) + int(document["out"])) // block_size
    blocks = published = _runs(document)
    if at + 1 < len(agent):
        following = _runs(agent[at + 1])
        if head(following, count(blocks)) == blocks:  # the next prompt goes on from this one
            published = head(following, num_blocks)
    busy_s = float(document.get("api_time", 0.0))  # some do not tell
    return Request(float(document["t"]), busy_s, num_tokens, blocks, published)


def _runs(document: dict[str, Any]) -> Runs:
    return tuple((int(first), int(length)) for first, length in document["hash_ids"])
