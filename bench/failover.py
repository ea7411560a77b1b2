"""How long a stream pauses when its decode worker is killed, from the kill to the next token at the client.

python -m bench.failover --kills 20

Baton has two decode workers. A stream is on its way; the worker that has it gets SIGKILL; the other goes on. What it
has to compute again is stated beside: the time to first token of a new prompt as long as prompt and answer were.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.live import Up, baton_up, random_tokens
from libs.wire.errors import BatonError

_ANSWER_TOKENS: Final = 400
_KILL_AT: Final = (20, 120)  # tokens of the answer that have come
_TIMEOUT_S: Final = 120.0


def events(up: Up, prompt: list[int]) -> Iterator[float]:
    """When each text of a stream comes. Raises BatonError for an error in it, or an early end."""
    body = {
        "model": up.model, "prompt": prompt, "max_tokens": _ANSWER_TOKENS, "temperature": 0, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{up.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    finished = False
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event: dict[str, Any] = json.loads(line[6:])
            if "error" in event:
                raise BatonError(f"the stream failed: {event['error']}")
            finished = finished or any(choice["finish_reason"] for choice in event["choices"])
            yield time.perf_counter()
    if not finished:
        raise BatonError("the stream ended before its answer did")


def pause_ms(up: Up, prompt: list[int], kill_at: int) -> float:
    """From the kill to the next token that was not already on its way when the worker died."""
    killed_s, longest_s, last_s = 0.0, 0.0, 0.0
    for number, now_s in enumerate(events(up, prompt), start=1):
        if killed_s:
            longest_s = max(longest_s, now_s - max(last_s, killed_s))
        if number == kill_at:
            killed_s = _kill_owner(up)
        last_s = now_s
    return 1e3 * longest_s


def _kill_owner(up: Up) -> float:
    """Returns when. Looking for the owner takes a moment, in which the stream goes on."""
    running = {
        status["instance_id"]: status["pid"]
        for status in up.status()
        if status["service"] == "decode" and status["load"]["running"]
    }
    if len(running) != 1:
        raise BatonError(f"one decode worker should have the stream, not {sorted(running)}")
    (pid,) = running.values()
    os.kill(pid, signal.SIGKILL)
    return time.perf_counter()


def _all_there(statuses: list[dict[str, Any]]) -> bool:
    return len([1 for each in statuses if (each["service"], each["state"]) == ("decode", "serving")]) == 2


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng, pauses, firsts = random.Random(arguments.seed), [], []
    with (
        tempfile.TemporaryDirectory(prefix="baton-failover-") as name,
        baton_up(Path(name), 1, "--decode", 2, "--kv-cache-mib", 256) as up,
    ):
        for number in range(1, arguments.kills + 1):
            up.until(_all_there, "two decode workers")
            kill_at = rng.randrange(*_KILL_AT)
            pauses.append(pause_ms(up, random_tokens(rng, arguments.prompt_tokens), kill_at))
            first_ms, _ = up.first_token_ms(random_tokens(rng, arguments.prompt_tokens + kill_at))
            firsts.append(first_ms)
            print(f"bench: kill {number}: {pauses[-1]:.0f} ms", file=sys.stderr, flush=True)
    cuts = statistics.quantiles(pauses, n=20, method="inclusive")
    print(f"{len(pauses)} kills, prompts of {arguments.prompt_tokens} tokens")
    print(f"  pause: p50 {cuts[9]:.0f} ms, p95 {cuts[18]:.0f} ms, longest {max(pauses):.0f} ms")
    print(f"  first token of a new prompt as long: {statistics.median(firsts):.0f} ms")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BatonError as error:
        sys.exit(f"bench: {error.message}")
