"""A thousand clients that hang up, each at a moment of its own, and nothing left of them within one lease.

Meanwhile a prefill worker is killed, which no client may notice.

python -m tests.chaos.aborts --count 1000 [--seed N]     or: make chaos
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp

from tests.chaos.faults import Fault, inflict
from tests.chaos.storm import know_answers
from tests.chaos.streams import Order, make_orders, new_session
from tests.chaos.town import Town, new_town

CONCURRENCY: Final = 16
LEASE_S: Final = 5.0
KILL_AFTER_S: Final = 5.0
MARGIN_S: Final = 3.0  # for the reaper's turn, and for asking every process how it is
MEAN_WAIT_S: Final = 0.1  # of those that hang up by the clock
PHASES: Final = ("before any token", "first token", "midway", "last token")


@dataclass(frozen=True, slots=True)
class Cut:
    """When a client hangs up: after `wait_s`, whatever has come; if that is None, with `events` read."""

    order: Order
    wait_s: float | None
    events: int = 0

    @property
    def num_tokens(self) -> int:
        return int(self.order.body["max_tokens"])


@dataclass(slots=True)
class Hung:
    """How far those came who hung up. `errors` are answers that were none."""

    phases: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


def make_cuts(rng: random.Random, orders: list[Order], count: int) -> list[Cut]:
    """Half by the clock, mostly while the request is placed, waits, is computed or handed over; half by what came."""
    cuts = []
    for order in rng.choices(orders, k=count):
        last = int(order.body["max_tokens"])
        if rng.random() < 0.5:
            cuts.append(Cut(order, rng.expovariate(1 / MEAN_WAIT_S)))
        else:
            cuts.append(Cut(order, None, rng.choice([1, rng.randrange(2, last), last])))
    return cuts


async def hang_up_all(url: str, model: str, cuts: list[Cut]) -> Hung:
    hung, left = Hung(), iter(cuts)

    async def client(session: aiohttp.ClientSession) -> None:
        for cut in left:
            read = itertools.count()
            try:
                async with asyncio.timeout(cut.wait_s):
                    error = await _read(
                        session, url, {**cut.order.body, "model": model, "stream": True}, cut, read
                    )
            except TimeoutError:
                error = ""
            hung.phases[_phase(next(read), cut.num_tokens)] += 1
            if error:
                hung.errors.append(error)

    async with new_session() as session:
        await asyncio.gather(*(client(session) for _ in range(CONCURRENCY)))
    return hung


async def _read(
    session: aiohttp.ClientSession, url: str, body: dict[str, object], cut: Cut, read: itertools.count[int]
) -> str:
    """Reads until the cut, and breaks the connection. Returns what is wrong with the answer, or ""."""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        try:
            if response.status != 200:
                return f"{response.status}: {(await response.text())[:300]}"
            async for line in response.content:
                if line.startswith(b"data: {") and next(read) + 1 == cut.events:
                    break
        finally:
            response.close()
    return ""


def _phase(num_events: int, num_tokens: int) -> str:
    if num_events < 2:
        return PHASES[num_events]
    return PHASES[2] if num_events < num_tokens else PHASES[3]


async def _hang_up(town: Town, cuts: list[Cut], fault: Fault) -> Hung:
    misfortune = asyncio.create_task(inflict(fault, town.pids))
    hung = await hang_up_all(town.baton.url, town.baton.model(), cuts)
    await misfortune
    return hung


def abort(state_dir: Path, seed: int, count: int) -> Counter[str]:
    """Returns how many hung up in each phase. Fails if something is left of them, or an answer is another one."""
    town, killed = (
        new_town(state_dir, "--lease-s", str(LEASE_S)),
        Fault("prefill-1", "kill", after_s=KILL_AFTER_S),
    )
    try:
        rng = random.Random(seed)
        orders = make_orders(rng)
        known = asyncio.run(know_answers(town, orders))
        town.calm()
        began_s = time.monotonic()
        hung = asyncio.run(_hang_up(town, make_cuts(rng, orders, count), killed))
        ended_s = time.monotonic()
        assert not hung.errors, hung.errors[:3]
        town.calm(LEASE_S + MARGIN_S)
        print(
            f"seed {seed}: {count} hung up in {ended_s - began_s:.1f} s, {dict(hung.phases)}; "
            f"nothing left {time.monotonic() - ended_s:.1f} s later",
            flush=True,
        )
        assert asyncio.run(know_answers(town, orders)) == known
        return hung.phases
    finally:
        town.stop()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if arguments.seed is None else arguments.seed
    with tempfile.TemporaryDirectory(prefix="baton-aborts-") as directory:
        abort(Path(directory), seed, arguments.count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
