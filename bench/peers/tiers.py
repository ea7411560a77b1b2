"""Time to the first token of one prompt of 4000: cold, and from each tier of the cache. llama.cpp's slot beside it.

python -m bench.peers.tiers --rounds 3 --build-dir DIR

A round starts `baton up` on an empty store, asks the prompt (cold) and again (own pool: the decode worker's), kills
the decode worker and asks (peer's pool: the prefill worker has the KV, the new decode worker nothing), waits until all
is written, kills every process with SIGKILL, starts `baton up` on what is left, and asks (store). Before each, a short
prompt wakes the processes, from the same tier. llama-server, with its own cache, answers the same prompt twice.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.live import Up, baton_up, kill, random_tokens
from bench.peers.llama_cpp import add_build_options, both, build_from
from bench.peers.llama_server import ask as ask_llama
from bench.peers.llama_server import serving as serving_llama
from bench.peers.options import add_common, model_of, threads_of
from libs.wire.errors import BatonError

_PROMPT_TOKENS, _WARM_TOKENS = 4000, 300
Times = dict[str, list[float]]


def one_round(threads: int, seed: int) -> dict[str, float]:
    """Milliseconds by tier. Raises BatonError where a prompt did not come from the tier it was to come from."""
    rng = random.Random(seed)
    prompt, other = random_tokens(rng, _PROMPT_TOKENS), random_tokens(rng, _WARM_TOKENS)
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="baton-tiers-") as name:
        folder = Path(name)

        def ask(up: Up, tier: str, *expected: str) -> None:
            up.first_token_ms(other)
            times[tier], where = up.first_token_ms(prompt)
            known = sum(where["baton_cache"][source] for source in expected)
            if (known if expected else _PROMPT_TOKENS - where["cached_tokens"]) < 0.98 * _PROMPT_TOKENS:
                raise BatonError(f"{tier}: the prompt came from elsewhere: {where}")

        with baton_up(folder, threads) as up:
            ask(up, "cold")
            ask(up, "own pool", "own_pool")
            _restart(up, "decode")
            ask(up, "peer's pool", "own_pool", "peer")  # of the worker that reads the prompt
            up.until(_all_written, "writing everything")
        with baton_up(folder, threads) as up:
            ask(up, "store", "store")
    return times


def llama_round(server: Path, model: Path, threads: int, seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    prompt = random_tokens(rng, _PROMPT_TOKENS)
    with serving_llama(server, model, threads, _PROMPT_TOKENS) as url:
        ask_llama(url, random_tokens(rng, _WARM_TOKENS))
        cold = ask_llama(url, prompt).wall_ms
        return {"cold": cold, "own slot": ask_llama(url, prompt).wall_ms}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    add_build_options(parser)
    parser.add_argument("--no-llama", action="store_true", help="Baton alone")
    arguments = parser.parse_args()
    threads, model = threads_of(arguments), model_of(arguments)
    servers = (
        []
        if arguments.no_llama
        else list(both(build_from(arguments, model), model, threads, arguments.cache))
    )
    found: dict[str, Times] = defaultdict(lambda: defaultdict(list))
    for number in range(1, arguments.rounds + 1):
        print(f"bench: round {number} of {arguments.rounds}", file=sys.stderr, flush=True)
        for tier, value in one_round(threads, number).items():
            found["Baton"][tier].append(value)
        for each in servers:
            for tier, value in llama_round(
                each.build.program("llama-server"), each.model, threads, number
            ).items():
                found[each.name][tier].append(value)
    print(json.dumps({name: dict(times) for name, times in found.items()}, indent=2))
    for name, times in found.items():
        for tier, values in times.items():
            cold = statistics.median(times["cold"])
            middle = statistics.median(values)
            spread = f"{min(values):.0f} to {max(values):.0f}"
            print(f"{name:16} {tier:12} {middle:8.1f} ms ({spread}), 1/{cold / middle:.1f} of cold")
    return 0


def _restart(up: Up, role: str) -> None:
    """Kills the worker of this role; `baton up` starts another."""
    (old,) = (status["pid"] for status in up.status() if status["service"] == role)
    kill(old)
    up.until(
        lambda found: any(
            s["service"] == role and s["pid"] != old and s["state"] == "serving" for s in found
        ),
        "a new worker",
    )
    time.sleep(1.0)  # the coordinator hears it, and forgets what the old one held


def _all_written(found: list[dict[str, Any]]) -> bool:
    return all(status["detail"].get("store_waiting", 0) == 0 for status in found)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BatonError as error:
        sys.exit(f"bench: {error.message}")
