"""Rounds of faults under streams whose answers are known.

python -m tests.chaos.storm --rounds 50 [--seed N]     or: make chaos

A round asks 16 streams at once, does one or two things to processes at random moments, and compares every answer
with that of the undisturbed run, byte for byte. Only a gateway that is killed may break its streams, and none of them
may look whole. Then there must be peace: every process back, nothing held, nothing left over.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from tests.chaos.faults import Fault, inflict, make_faults
from tests.chaos.streams import Answer, Order, ask_all, make_orders, new_session
from tests.chaos.town import Town, new_town

NUM_STREAMS = 16
VICTIMS = ("prefill-1", "prefill-2", "decode-1", "decode-2", "cache-1", "gateway-1", "nats-1")


async def know_answers(town: Town, orders: list[Order]) -> list[Answer]:
    """From the undisturbed cluster. Raises AssertionError for one that is none."""
    async with new_session() as session:
        answers = await ask_all(session, town.baton.url, town.baton.model(), orders)
    for answer in answers:
        assert isinstance(answer, Answer) and not answer.error and answer.finish == "length", answer
    return [answer for answer in answers if isinstance(answer, Answer)]


async def one_round(town: Town, orders: list[Order], faults: list[Fault]) -> list[Answer | BaseException]:
    async with new_session() as session:
        storm = asyncio.gather(*(inflict(fault, town.pids) for fault in faults))
        answers = await ask_all(session, town.baton.url, town.baton.model(), orders)
        await storm
    return answers


def may_break(faults: list[Fault]) -> bool:
    """The connections of clients are in the hands of a process that is killed."""
    return any(fault.victim == "gateway-1" and fault.action == "kill" for fault in faults)


def is_broken(answer: Answer | BaseException, known: Answer) -> bool:
    """Cut off, and the client can tell: what came is a beginning, and no end was claimed."""
    if isinstance(answer, aiohttp.ClientError):
        return True
    return (
        isinstance(answer, Answer)
        and bool(answer.error)
        and answer.finish is None
        and known.text.startswith(answer.text)
    )


def weather(state_dir: Path, seed: int, rounds: int) -> None:
    """Fails in the first round that changes an answer or leaves something behind, and names the seed."""
    town = new_town(state_dir)
    try:
        orders = make_orders(random.Random(seed))
        known = asyncio.run(know_answers(town, orders))
        town.calm()
        for number in range(1, rounds + 1):
            rng = random.Random(f"{seed} {number}")
            chosen, faults = rng.sample(orders, NUM_STREAMS), make_faults(rng, VICTIMS)
            what = f"seed {seed}, round {number}: " + "; ".join(map(str, faults))
            began = time.monotonic()
            answers = asyncio.run(one_round(town, chosen, faults))
            broken = 0
            for order, answer in zip(chosen, answers, strict=True):
                if may_break(faults) and is_broken(answer, known[order.number]):
                    broken += 1
                    continue
                assert answer == known[order.number], (
                    f"{what}\norder {order.number}\n{answer!r}\n{known[order.number]!r}"
                )
            streamed_s = time.monotonic() - began
            try:
                town.calm()
            except AssertionError as error:
                raise AssertionError(f"{what}\n{error}") from None
            print(
                f"{what}: {NUM_STREAMS - broken} answers as ever, {streamed_s:.1f} s; "
                f"peace {time.monotonic() - began:.1f} s",
                flush=True,
            )
    finally:
        town.stop()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument(
        "--seed", type=int, default=None, help="default: another one each time, which is printed"
    )
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as directory:
        weather(Path(directory), seed, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
