"""What other people's long prompts do to a stream's pace; llama-server beside it.

python -m bench.interference --rounds 3 --build-dir DIR

Four streams decode while prompts of 4096 tokens arrive one after the other, each with an answer of eight tokens
(busy); then four new ones for as long with nothing beside them (quiet). Measured at the client: the time between two
tokens of a stream.

Baton has a prefill and a decode worker with one thread each; with --pin, the decode worker has a core for itself.
llama-server has all cores. They take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import aiohttp

from bench.live import Up, baton_up, random_tokens
from bench.peers.llama_cpp import add_build_options, both, build_from
from bench.peers.llama_server import serving as serving_llama
from bench.peers.options import add_common, model_of, threads_of
from libs.wire.errors import BatonError

_NUM_STREAMS, _STREAM_TOKENS = 4, 3500
_PROMPT_TOKENS, _ANSWER_TOKENS = 4096, 8
_SETTLE_S, _TIMEOUT_S = 1.0, 300.0
_LLAMA_CONTEXT = 6 * 4608  # llama-server divides it by its slots


@dataclass(slots=True)
class Span:
    """Arrival times of each stream's tokens, in seconds of time.perf_counter, and when measuring began and ended."""

    arrivals: list[list[float]]
    start_s: float = 0.0
    end_s: float = 0.0
    first_token_s: list[float] = field(default_factory=list)  # of the long prompts, from asking

    def gaps_ms(self) -> list[float]:
        """Of all streams: those that end while it is measured."""
        return [
            1e3 * (after - before)
            for times in self.arrivals
            for before, after in pairwise(times)
            if self.start_s <= after <= self.end_s
        ]


@dataclass(frozen=True, slots=True)
class Round:
    """Both spans, of the same length."""

    quiet: Span
    busy: Span


async def tokens(
    session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], num_tokens: int
) -> AsyncIterator[float]:
    """When each event with text arrives. Raises BatonError for an answer that is none."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True,
        "ignore_eos": True, "cache_prompt": True,
    }  # fmt: skip
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise BatonError(f"{url} answered {response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            if line.startswith(b"data: {") and json.loads(line[6:]).get("choices"):
                yield time.perf_counter()


async def measure(url: str, model: str, num_prompts: int, seed: int) -> Round:
    """One round against a server."""
    busy_s, spans = 0.0, {}
    for is_busy in (True, False):
        spans[is_busy] = await _span(url, model, num_prompts if is_busy else 0, busy_s, seed)
        busy_s = spans[is_busy].end_s - spans[is_busy].start_s
    return Round(quiet=spans[False], busy=spans[True])


async def _span(url: str, model: str, num_prompts: int, quiet_s: float, seed: int) -> Span:
    """New streams, so that their contexts are as long in each span; measured while prompts come, or for `quiet_s`."""
    rng = random.Random(f"{seed} {num_prompts}")
    found = Span([[] for _ in range(_NUM_STREAMS)])
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:

        async def read(times: list[float], prompt: list[int]) -> None:
            async for now_s in tokens(session, url, model, prompt, _STREAM_TOKENS):
                times.append(now_s)  # noqa: PERF401  others look on
            raise BatonError("a stream ended before the round did")

        async def work() -> None:
            while not all(found.arrivals):  # noqa: ASYNC110  a poll before the clock starts
                await asyncio.sleep(0.01)
            await asyncio.sleep(_SETTLE_S)
            found.start_s = time.perf_counter()
            await asyncio.sleep(quiet_s)
            for _ in range(num_prompts):
                asked_s, prompt = time.perf_counter(), random_tokens(rng, _PROMPT_TOKENS)
                times = [now_s async for now_s in tokens(session, url, model, prompt, _ANSWER_TOKENS)]
                found.first_token_s.append(times[0] - asked_s)
            found.end_s = time.perf_counter()

        readers = [asyncio.create_task(read(times, random_tokens(rng, 32))) for times in found.arrivals]
        try:
            await _or_failure(asyncio.create_task(work()), readers)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
    return found


async def _or_failure(work: asyncio.Task[None], readers: list[asyncio.Task[None]]) -> None:
    await asyncio.wait([work, *readers], return_when=asyncio.FIRST_COMPLETED)
    for reader in readers:
        if reader.done():
            work.cancel()
            reader.result()
    await work


@contextmanager
def serving_baton(pin: bool) -> Iterator[Up]:
    with (
        tempfile.TemporaryDirectory(prefix="baton-interference-") as name,
        baton_up(Path(name), 1, "--kv-cache-mib", 1024, *(["--pin"] if pin else [])) as up,
    ):
        up.first_token_ms(random_tokens(random.Random(0), 300))
        if pin:  # the client keeps away, too
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:-1])
        yield up


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    add_build_options(parser)
    parser.add_argument("--prompts", type=int, default=3, help="in each round")
    parser.add_argument("--pin", action="store_true", help="`baton up --pin`")
    parser.add_argument("--no-llama", action="store_true", help="Baton alone")
    arguments = parser.parse_args()
    threads, model, cores = threads_of(arguments), model_of(arguments), os.sched_getaffinity(0)
    servers = [] if arguments.no_llama else list(
        both(build_from(arguments, model), model, threads, arguments.cache)
    )  # fmt: skip
    found: dict[str, list[Round]] = {}
    for number in range(1, arguments.rounds + 1):
        print(f"bench: round {number} of {arguments.rounds}", file=sys.stderr, flush=True)
        with serving_baton(arguments.pin) as up:
            found.setdefault("Baton", []).append(
                asyncio.run(measure(up.url, up.model, arguments.prompts, number))
            )
        os.sched_setaffinity(0, cores)
        for each in servers:
            program = each.build.program("llama-server")
            with serving_llama(program, each.model, threads, _LLAMA_CONTEXT, slots=6) as url:
                round_ = asyncio.run(measure(url, each.name, arguments.prompts, number))
            found.setdefault(each.name, []).append(round_)
    for name, rounds in found.items():
        print(_report(name, rounds))
    return 0


def _report(name: str, rounds: list[Round]) -> str:
    """Percentiles of each round; of them medians, least and most."""
    lines = [name]
    for percent in (50, 99):
        quiet = [_percentile(each.quiet.gaps_ms(), percent) for each in rounds]
        busy = [_percentile(each.busy.gaps_ms(), percent) for each in rounds]
        ratios = [b / q for b, q in zip(busy, quiet, strict=True)]
        lines.append(
            f"  gap p{percent}: quiet {_spread(quiet)} ms, busy {_spread(busy)} ms, ratio {_spread(ratios, 2)}"
        )
    lines.append(f"  longest gap, busy: {_spread([max(each.busy.gaps_ms()) for each in rounds])} ms")
    prompts = [1e3 * value for each in rounds for value in each.busy.first_token_s]
    lines.append(f"  first token of the {len(prompts)} prompts: {_spread(prompts, 0)} ms")
    return "\n".join(lines)


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _spread(values: list[float], digits: int = 1) -> str:
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({least:.{digits}f}..{most:.{digits}f})"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BatonError as error:
        sys.exit(f"bench: {error.message}")
