"""Every service replaced in turn, workers added and taken away, under clients that never stop asking.

No request may fail, and every answer must be the one of the undisturbed run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from services.cli.running import find
from tests.chaos.storm import know_answers
from tests.chaos.streams import Answer, Order, ask, make_orders, new_session
from tests.chaos.town import WORKER_OPTIONS, Town, new_town

CLIENTS: Final = 8
IN_TURN: Final = (
    "prefill-1",
    "decode-1",
    "cache-1",
    "gateway-1",
    "decode-2",
    "prefill-2",
    "gateway-1",
    "nats-1",
)
RETURN_S: Final = 60.0
POLL_S: Final = 0.2


@dataclass(slots=True)
class Asked:
    """What the clients got so far."""

    answers: int = 0
    wrong: list[str] = field(default_factory=list)


async def keep_asking(
    town: Town, orders: list[Order], known: list[Answer], asked: Asked, stop: asyncio.Event
) -> None:
    """Each request on a connection of its own. Ends, once `stop` is set, with the last answer."""

    async def client(number: int) -> None:
        rng = random.Random(number)
        while not stop.is_set():
            order = rng.choice(orders)
            async with new_session() as session:
                try:
                    answer: Answer | Exception = await ask(session, town.baton.url, model, order)
                except Exception as error:
                    answer = error
            asked.answers += 1
            if answer != known[order.number]:
                asked.wrong.append(f"order {order.number}: {answer!r}, not {known[order.number]!r}")

    model = town.baton.model()
    await asyncio.gather(*(client(number) for number in range(CLIENTS)))


def roll(town: Town, asked: Asked) -> None:
    """SIGTERM to each in turn; the next when the one before is back at work and has answered."""
    for name in IN_TURN:
        old = town.pids()[name]
        os.kill(old, signal.SIGTERM)
        _until(lambda: town.pids().get(name, old) != old, f"another {name}")  # noqa: B023
        if name != "nats-1":
            _until(lambda: name in _at_work(town), f"{name} at work")  # noqa: B023
        before = asked.answers
        _until(lambda: asked.answers > before + CLIENTS, "answers")  # noqa: B023
        assert not asked.wrong, f"after {name}: {asked.wrong[:3]}"


def add_and_remove(town: Town, asked: Asked) -> None:
    """Two more workers, as a person starts them on this or on another machine; then they are stopped."""
    with _worker(town, "prefill", "prefill-9"), _worker(town, "decode", "decode-9"):
        _until(lambda: {"prefill-9", "decode-9"} <= _at_work(town), "the new workers at work")
        before = asked.answers
        _until(lambda: asked.answers > before + 4 * CLIENTS, "answers")
        assert _has_worked(town, "decode-9")
    before = asked.answers
    _until(lambda: asked.answers > before + CLIENTS, "answers")
    assert not asked.wrong, asked.wrong[:3]


@contextmanager
def _worker(town: Town, role: str, name: str) -> Iterator[None]:
    running = find(town.baton.state_dir)
    assert running is not None
    command = [
        sys.executable, "-m", "services.cli", role, "--nats", running.nats_url, "--instance-id", name,
        "--state-dir", str(town.baton.state_dir), *WORKER_OPTIONS,
    ]  # fmt: skip
    log = town.baton.state_dir / "logs" / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=town.baton.env, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        code = process.wait(timeout=RETURN_S)
    assert code == 0, log.read_text()[-2000:]


def _at_work(town: Town) -> set[str]:
    statuses = town.baton.json("status")
    return {each["instance_id"] for each in statuses if each["state"] in ("serving", "ready")}


def _has_worked(town: Town, worker_id: str) -> bool:
    return any(
        each["instance_id"] == worker_id and each["load"]["blocks_free"] < each["load"]["blocks_total"]
        for each in town.baton.json("status")
    )


def _until(condition: object, what: str) -> None:
    assert callable(condition)
    deadline = time.monotonic() + RETURN_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {RETURN_S:g} s for {what}"
        time.sleep(POLL_S)


async def _change_everything(town: Town, orders: list[Order], known: list[Answer]) -> Asked:
    asked, stop = Asked(), asyncio.Event()
    asking = asyncio.create_task(keep_asking(town, orders, known, asked, stop))
    try:
        await asyncio.to_thread(roll, town, asked)
        await asyncio.to_thread(add_and_remove, town, asked)
    finally:
        stop.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
    return asked


def replace_everything(state_dir: Path, seed: int) -> int:
    """Returns how many requests were answered meanwhile. Fails if one was not, or with another text."""
    town = new_town(state_dir)
    try:
        orders = make_orders(random.Random(seed))
        known = asyncio.run(know_answers(town, orders))
        town.calm()
        asked = asyncio.run(_change_everything(town, orders, known))
        assert not asked.wrong, asked.wrong[:3]
        town.calm()
        return asked.answers
    finally:
        town.stop()
