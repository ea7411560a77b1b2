"""Mooncake's traces (FAST'25, Apache-2.0): one request a line, by time.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..., 2354]}

`timestamp` in milliseconds; a hash id for each 512 tokens, the last of them for what is left. It does not tell which
requests are of one conversation, so each is a session of its own, and all share their blocks.
"""

from __future__ import annotations

import json
from pathlib import Path

from libs.bench.cache.trace import Request, Session, Trace, TraceError, head, to_runs

BLOCK_TOKENS = 512
SECONDS_PER_TOKEN = 0.02  # of an answer; the trace does not tell how long one took


def read(path: Path) -> Trace:
    """Raises TraceError, naming the line."""
    sessions: list[Session] = []
    number = 0
    try:
        with path.open() as lines:
            for line in lines:
                number += 1
                sessions.append(Session("", (_request(line),)))
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise TraceError(f"{path}, line {number}: {error!r}") from error
    if not sessions:
        raise TraceError(f"{path}: no requests")
    return Trace(path.name, BLOCK_TOKENS, tuple(sessions), has_own_times=True)


def _request(line: str) -> Request:
    document = json.loads(line)
    num_tokens = int(document["input_length"])
    blocks = head(to_runs([int(each) for each in document["hash_ids"]]), num_tokens // BLOCK_TOKENS)
    busy_s = SECONDS_PER_TOKEN * int(document["output_length"])
    return Request(int(document["timestamp"]) / 1e3, busy_s, num_tokens, blocks, blocks)
