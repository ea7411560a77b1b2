"""What a service does beyond its capacity: what it still finishes, how soon it refuses the rest, what it holds.

python -m bench.overload --seconds 60 --times 4

First the capacity: closed loops of more and more clients, and the best rate of finished answers. Then clients that do
not wait: requests at so many times that rate, at random moments. An answer counts (goodput) if it is whole and came
within the deadline. Baton has a prefill and a decode worker; the clients run on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp

from bench.live import Up, baton_up, random_tokens
from libs.wire.errors import BatonError

_PROMPT_TOKENS: Final = (64, 512)
_ANSWER_TOKENS: Final = (16, 96)
_LEVELS: Final = (8, 16, 32)  # clients of the closed loops
_WARM_S: Final = 5.0  # until a loop is in its stride
_LEVEL_S: Final = 15.0
_GRACE_S: Final = 5.0  # an answer that comes later than deadline and grace has been forgotten


@dataclass(slots=True)
class Outcome:
    """Of one load. Times are in seconds."""

    seconds: float = 0.0
    done: list[float] = field(default_factory=list)  # how long those took that were whole
    refused: list[float] = field(default_factory=list)  # how soon those were told that got 429 or 503
    late: int = 0  # told that the deadline had passed
    silent: int = 0  # neither answered nor told within the deadline
    odd: Counter[str] = field(default_factory=Counter)  # anything else
    no_retry_after: int = 0

    @property
    def rate(self) -> float:
        return len(self.done) / self.seconds


class Load:
    """Clients of one Baton. Each request is another."""

    def __init__(self, up: Up, deadline_s: float, seed: int) -> None:
        self._url, self._model = f"{up.url}/v1/completions", up.model
        self._deadline_s = deadline_s
        self._rng = random.Random(seed)

    async def closed(self, num_clients: int, seconds: float) -> Outcome:
        """Each client asks again when it has its answer. Counts what is done in `seconds`, after a start."""
        outcome = Outcome(seconds)
        async with _session() as session:

            async def client() -> None:
                while True:
                    await self._ask(session, outcome)

            clients = [asyncio.create_task(client()) for _ in range(num_clients)]
            await asyncio.sleep(_WARM_S)
            before = len(outcome.done)
            await asyncio.sleep(seconds)
            del outcome.done[:before]
            for each in clients:
                each.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        return outcome

    async def open(self, rate: float, seconds: float) -> Outcome:
        """Requests come at random, `rate` of them in a second, whatever becomes of them."""
        outcome, start_s, asked = Outcome(seconds), time.monotonic(), []
        next_s = start_s
        async with _session() as session:
            while (next_s := next_s + self._rng.expovariate(rate)) < start_s + seconds:
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                asked.append(asyncio.create_task(self._ask(session, outcome)))
            await asyncio.gather(*asked)
        outcome.seconds = time.monotonic() - start_s
        return outcome

    async def _ask(self, session: aiohttp.ClientSession, outcome: Outcome) -> None:
        num_tokens = self._rng.randrange(*_ANSWER_TOKENS)
        body = {
            "model": self._model, "prompt": random_tokens(self._rng, self._rng.randrange(*_PROMPT_TOKENS)),
            "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        began_s = time.monotonic()
        try:
            async with (
                asyncio.timeout(self._deadline_s + _GRACE_S),
                session.post(self._url, json=body) as response,
            ):
                answer = json.loads(await response.read())
        except TimeoutError:
            outcome.silent += 1
            return
        took_s = time.monotonic() - began_s
        if response.status == 200 and answer["usage"]["completion_tokens"] == num_tokens:
            outcome.done.append(took_s)
        elif response.status in (429, 503):
            outcome.refused.append(took_s)
            outcome.no_retry_after += "Retry-After" not in response.headers
        elif response.status == 504:
            outcome.late += 1
        else:
            outcome.odd[f"{response.status} {answer.get('error', {}).get('code')}"] += 1


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def capacity(load: Load) -> float:
    """The best rate of finished answers, of closed loops."""
    best = 0.0
    for clients in _LEVELS:
        outcome = await load.closed(clients, _LEVEL_S)
        print(
            f"  {clients} clients: {outcome.rate:.2f} answers/s, {len(outcome.refused)} refused", flush=True
        )
        best = max(best, outcome.rate)
    return best


def memory_mib(up: Up) -> dict[str, float]:
    """Resident, without what is shared with other processes (Pss counts that once), by process."""
    found = {}
    for status in up.status():
        rollup = Path(f"/proc/{status['pid']}/smaps_rollup").read_text()
        private = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_"))
        found[status["instance_id"]] = private / 1024
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=4.0, help="of the capacity")
    parser.add_argument("--deadline-s", type=float, default=10.0, help="`baton up --request-timeout-s`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options", default="", help="more options of `baton up`")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="baton-overload-") as name,
        baton_up(
            Path(name), 1, "--kv-cache-mib", 512, "--request-timeout-s", arguments.deadline_s,
            *arguments.options.split(),
        ) as up,
    ):  # fmt: skip
        load = Load(up, arguments.deadline_s, arguments.seed)
        print("capacity", flush=True)
        best = asyncio.run(capacity(load))
        before = memory_mib(up)
        outcome = asyncio.run(load.open(arguments.times * best, arguments.seconds))
        after = memory_mib(up)
    print(_report(arguments, best, outcome))
    for who in before:
        print(f"  {who}: private memory {before[who]:.0f} MiB before, {after.get(who, 0.0):.0f} after")
    return 0


def _report(arguments: argparse.Namespace, best: float, outcome: Outcome) -> str:
    lines = [
        f"{arguments.times:g} times the capacity for {arguments.seconds:g} s, deadline {arguments.deadline_s:g} s",
        f"  done {len(outcome.done)}: goodput {outcome.rate:.2f}/s, {outcome.rate / best:.2f} of the best",
        f"  refused {len(outcome.refused)}, {outcome.no_retry_after} of them without Retry-After; "
        f"too late {outcome.late}; silent {outcome.silent}; {dict(outcome.odd)}",
    ]
    for what, times in (("answers", outcome.done), ("refusals", outcome.refused)):
        if len(times) > 1:
            cuts = statistics.quantiles(times, n=100, method="inclusive")
            p50, p99, most = 1e3 * cuts[49], 1e3 * cuts[98], 1e3 * max(times)
            lines.append(f"  {what}: p50 {p50:.1f} ms, p99 {p99:.1f} ms, longest {most:.1f} ms")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BatonError as error:
        sys.exit(f"bench: {error.message}")
