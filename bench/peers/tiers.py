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
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.commands import output_of
from bench.peers.llama_cpp import add_build_options, both, build_from
from bench.peers.llama_server import ask as ask_llama
from bench.peers.llama_server import serving as serving_llama
from bench.peers.options import add_common, model_of, threads_of
from libs.wire.errors import BatonError

_PROMPT_TOKENS, _WARM_TOKENS = 4000, 300
_TOKEN_IDS = (1000, 20000)
_START_S, _WRITE_S, _ANSWER_S, _POLL_S = 120.0, 120.0, 120.0, 0.1
Times = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Up:
    """A running `baton up`."""

    folder: Path
    url: str
    model: str

    def first_token_ms(self, prompt: list[int]) -> tuple[float, dict[str, Any]]:
        """Until the first text of a stream, at the client; and where the prompt's tokens came from."""
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        usage: dict[str, Any] = {}
        begin, first_s = time.perf_counter(), 0.0
        with _opener().open(request, timeout=_ANSWER_S) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                first_s = first_s or time.perf_counter() - begin
                usage = json.loads(line[6:]).get("usage") or usage
        return 1e3 * first_s, usage["prompt_tokens_details"]

    def status(self) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "services.cli", "status", "--json", "--state-dir", self.folder]
        found: list[dict[str, Any]] = json.loads(output_of(command, timeout_s=30))
        return found

    def until(self, condition: Callable[[list[dict[str, Any]]], bool], what: str) -> None:
        deadline = time.monotonic() + _WRITE_S
        while not condition(self.status()):
            if time.monotonic() > deadline:
                raise BatonError(f"{what} did not come about within {_WRITE_S:g} s")
            time.sleep(_POLL_S)


@contextmanager
def baton_up(folder: Path, threads: int, *options: object) -> Iterator[Up]:
    """Killed at the end, every process of it, with SIGKILL."""
    command = [
        sys.executable, "-m", "services.cli", "up", "--port", "0", "--state-dir", folder, "--threads", threads,
        *options,
    ]  # fmt: skip
    log = folder / "bench-up.log"
    folder.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        pids: list[int] = [process.pid]
        try:
            url = _ready_url(process, log)
            model = json.loads(_opener().open(f"{url}/v1/models", timeout=10).read())["data"][0]["id"]
            up = Up(folder, url, model)
            pids += [status["pid"] for status in up.status()]
            yield up
            pids += [status["pid"] for status in up.status()]
        finally:
            for pid in pids:
                _kill(pid)
            process.wait()


def one_round(threads: int, seed: int) -> dict[str, float]:
    """Milliseconds by tier. Raises BatonError where a prompt did not come from the tier it was to come from."""
    rng = random.Random(seed)
    prompt, other = _tokens(rng, _PROMPT_TOKENS), _tokens(rng, _WARM_TOKENS)
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
    prompt = _tokens(rng, _PROMPT_TOKENS)
    with serving_llama(server, model, threads, _PROMPT_TOKENS) as url:
        ask_llama(url, _tokens(rng, _WARM_TOKENS))
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
    _kill(old)
    up.until(
        lambda found: any(
            s["service"] == role and s["pid"] != old and s["state"] == "serving" for s in found
        ),
        "a new worker",
    )
    time.sleep(1.0)  # the coordinator hears it, and forgets what the old one held


def _all_written(found: list[dict[str, Any]]) -> bool:
    return all(status["detail"].get("store_waiting", 0) == 0 for status in found)


def _ready_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        _, found, rest = log.read_text(errors="replace").partition("ready at ")
        if found and "\n" in rest:
            return rest.split()[0]
        time.sleep(_POLL_S)
    raise BatonError(f"`baton up` did not get ready: {log.read_text(errors='replace')[-500:]}")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(*_TOKEN_IDS) for _ in range(count)]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BatonError as error:
        sys.exit(f"bench: {error.message}")
