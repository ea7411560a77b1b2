"""Two hosts with a bad network between them: prefill and decode workers on both, KV over TCP.

python -m tests.chaos.hosts --rounds 10 [--seed N]     as root; or: make chaos

A round asks 16 streams at once; meanwhile the network delays, loses, or is cut for a while, and a worker of the far
host may be killed. Every answer must be that of the undisturbed run; afterwards there must be peace.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.chaos.router import Namespace, Router, Weather, enter, why_not
from tests.chaos.storm import NUM_STREAMS, know_answers
from tests.chaos.streams import Answer, Order, ask_all, make_orders, new_session
from tests.chaos.town import WORKER_OPTIONS, Town
from tests.e2e.running import Baton
from tests.natsd import start_nats, stop_nats

OPTIONS: Final = ("--transfers", "tcp", "--store", "none", "--local-prefill-tokens", "16", *WORKER_OPTIONS)
START_S: Final = 60.0
LOSS_S: Final = 2.0  # a worker that is silent for so long counts as dead


@dataclass(frozen=True, slots=True)
class Gale:
    """One round's misfortune. `killed`: a worker of the far host, or nobody."""

    weather: Weather
    after_s: float
    lasts_s: float
    killed: str | None

    def __str__(self) -> str:
        killed = f", {self.killed} killed" if self.killed else ""
        return f"{self.weather} for {self.lasts_s:.1f} s after {self.after_s:.1f} s{killed}"


def make_gale(rng: random.Random) -> Gale:
    """A partition is shorter or longer than what takes a worker for dead."""
    if rng.random() < 0.5:
        lasts_s = rng.choice([rng.uniform(0.2, LOSS_S), rng.uniform(LOSS_S, 3 * LOSS_S)])
        weather = Weather(loss=1.0)
    else:
        lasts_s = rng.uniform(1.0, 6.0)
        weather = Weather(rng.uniform(0.001, 0.1), rng.choice([0.0, 0.005, 0.03]))
    killed = rng.choice(["prefill-b", "decode-b", None, None])
    return Gale(weather, rng.uniform(0.0, 1.5), lasts_s, killed)


class FarHost:
    """Workers of another host, started again when they are gone, as a supervisor there would."""

    def __init__(self, host: Namespace, nats_url: str, baton: Baton, folder: Path) -> None:
        self._host = host
        self._nats_url = nats_url
        self._baton = baton
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Whoever does not run."""
        for role in ("prefill", "decode"):
            name = f"{role}-b"
            if name not in self._processes or self._processes[name].poll() is not None:
                self._processes[name] = self._worker(role, name)

    def kill(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM to all; none may need more. Fails otherwise."""
        for process in self._processes.values():
            process.terminate()
        codes = {name: process.wait(timeout=60) for name, process in self._processes.items()}
        assert not any(codes.values()), codes

    def _worker(self, role: str, name: str) -> subprocess.Popen[bytes]:
        command = [
            "ip", "netns", "exec", self._host.name, sys.executable, "-m", "services.cli", role,
            "--nats", self._nats_url, "--instance-id", name, "--state-dir", str(self._folder), *OPTIONS,
        ]  # fmt: skip
        with (self._folder / f"{name}.log").open("ab") as output:
            return subprocess.Popen(command, env=self._baton.env, stdout=output, stderr=output)


@contextmanager
def two_hosts(folder: Path, router: Router) -> Iterator[tuple[Town, FarHost]]:
    """NATS, coordinator, gateway and two workers here, two more over there. This thread moves to the near host."""
    enter(router.a)
    url, nats = start_nats(folder, host=router.a.address)
    near, far_folder = folder / "near", folder / "far"
    far_folder.mkdir()
    try:
        town = Town(Baton(near, "--nats", url, *OPTIONS))
        far = FarHost(router.b, url, town.baton, far_folder)
        try:
            far.start()
            town.calm(START_S)
            yield town, far
            far.stop()
        finally:
            town.stop()
    finally:
        stop_nats(nats)


async def _round(
    town: Town, far: FarHost, router: Router, gale: Gale, orders: list[Order]
) -> list[Answer | BaseException]:
    async def blow() -> None:
        await asyncio.sleep(gale.after_s)
        router.weather = gale.weather
        if gale.killed:
            far.kill(gale.killed)
        await asyncio.sleep(gale.lasts_s)
        router.weather = Weather()

    async with new_session() as session:
        gust = asyncio.create_task(blow())
        answers = await ask_all(session, town.baton.url, town.baton.model(), orders)
        await gust
    return answers


def weather_hosts(folder: Path, seed: int, rounds: int) -> None:
    """Fails in the first round that changes an answer or leaves something behind, and names the seed."""
    with Router(seed) as router, two_hosts(folder, router) as (town, far):
        orders = make_orders(random.Random(seed))
        known = asyncio.run(know_answers(town, orders))
        town.calm()
        for number in range(1, rounds + 1):
            rng = random.Random(f"{seed} {number}")
            chosen, gale = rng.sample(orders, NUM_STREAMS), make_gale(rng)
            what, began_s, packets = (
                f"seed {seed}, round {number}: {gale}",
                time.monotonic(),
                router.num_packets,
            )
            answers = asyncio.run(_round(town, far, router, gale, chosen))
            for order, answer in zip(chosen, answers, strict=True):
                assert answer == known[order.number], (
                    f"{what}\norder {order.number}\n{answer!r}\n{known[order.number]!r}"
                )
            streamed_s = time.monotonic() - began_s
            far.start()
            try:
                town.calm()
            except AssertionError as error:
                raise AssertionError(f"{what}\n{error}") from None
            print(
                f"{what}: {NUM_STREAMS} answers as ever, {streamed_s:.1f} s, {router.num_packets - packets} packets; "
                f"peace {time.monotonic() - began_s:.1f} s",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    arguments = parser.parse_args()
    if reason := why_not():
        print(f"two hosts cannot be made here: {reason}", file=sys.stderr)
        return 1
    seed = random.SystemRandom().randrange(1 << 30) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="baton-hosts-") as directory:
        weather_hosts(Path(directory), seed, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
