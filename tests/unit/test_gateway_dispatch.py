"""The inbox of a request: what is stale, double or missing never reaches the answer."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from libs.wire.errors import Code
from libs.wire.messages import Cached, Delta, Failed, Finished, StepOutput, Token
from services.gateway.dispatch import Dispatcher, Inbox, WorkerLost


def delta(seq: int, *ids: int, attempt: int = 1, request_id: str = "r") -> Delta:
    tokens = tuple(Token(id=i) for i in ids)
    return Delta(request_id=request_id, attempt=attempt, seq=seq, tokens=tokens)


def finished(num_tokens: int, attempt: int = 1) -> Finished:
    return Finished(
        request_id="r", attempt=attempt, reason="stop", num_tokens=num_tokens, cached=Cached(tokens=0)
    )


class Rig:
    def __init__(self, max_tokens: int = 100) -> None:
        self.counts: Counter[str] = Counter()
        self.dispatcher = Dispatcher(self._count)
        self.inbox: Inbox = self.dispatcher.open("r", max_tokens)
        self.inbox.expect(1, "d1", "p1")

    def _count(self, kind: str) -> None:
        self.counts[kind] += 1

    def step(self, *outputs: Delta | Finished | Failed, worker: str = "d1") -> None:
        self.dispatcher.deliver(StepOutput(worker_id=worker, outputs=outputs))

    async def ids(self) -> list[int]:
        items = await self.inbox.take(0)
        return [token.id for item in items if isinstance(item, Delta) for token in item.tokens]


async def test_in_order() -> None:
    rig = Rig()
    rig.step(delta(0, 1, 2), delta(2, 3))
    rig.step(finished(3))
    items = await rig.inbox.take(1)
    assert len(items) == 3 and not rig.counts


async def test_several_requests_in_one_message() -> None:
    rig = Rig()
    other = rig.dispatcher.open("s", 10)
    other.expect(1, "d1", None)
    rig.step(delta(0, 1), delta(0, 7, request_id="s"), delta(0, 9, request_id="nobody"))
    assert await rig.ids() == [1] and len(await other.take(0)) == 1
    assert rig.counts == {"unknown": 1}


async def test_duplicates_are_dropped_and_overlaps_cut() -> None:
    rig = Rig()
    rig.step(delta(0, 1, 2))
    rig.step(delta(0, 1, 2))
    rig.step(delta(1, 2, 3, 4))
    assert await rig.ids() == [1, 2, 3, 4]
    assert rig.counts == {"duplicate": 2}


@pytest.mark.parametrize("damage", ["gap", "short", "long", "overflow"])
async def test_missing_or_surplus_tokens_are_failures(damage: str) -> None:
    rig = Rig(max_tokens=3)
    rig.step(delta(0, 1))
    if damage == "gap":
        rig.step(delta(2, 3))
    elif damage == "overflow":
        rig.step(delta(1, 2, 3, 4))
    else:
        rig.step(finished(0 if damage == "short" else 2))
    rig.step(delta(1, 9), finished(2))  # too late to matter
    items = await rig.inbox.take(0)
    expected = (Code.INTERNAL, False) if damage == "overflow" else (Code.WORKER_LOST, True)
    assert isinstance(items[-1], Failed) and (items[-1].code, items[-1].retryable) == expected
    assert len(items) == 2 and rig.counts["stale"] == 2
    assert rig.counts["overflow" if damage == "overflow" else "gap"] == 1


async def test_older_attempts_and_other_workers_are_stale() -> None:
    rig = Rig()
    rig.step(delta(0, 1))
    rig.inbox.expect(2, "d2", None)
    rig.step(delta(0, 1), finished(1))  # attempt 1
    rig.step(delta(0, 5, attempt=2), worker="d1")
    rig.step(delta(0, 6, attempt=2), worker="d2")
    assert await rig.ids() == [6] and rig.counts == {"stale": 3}


async def test_without_a_named_worker_whoever_answers_counts() -> None:
    rig = Rig()
    rig.inbox.expect(1, None, None)
    rig.step(delta(0, 1), worker="d7")
    assert await rig.ids() == [1]


async def test_losses_reach_those_concerned() -> None:
    rig = Rig()
    rig.dispatcher.worker_lost("d9", "silent")
    rig.dispatcher.worker_lost("p1", "silent")
    rig.dispatcher.worker_lost("d1", "silent")
    assert await rig.inbox.take(0) == [WorkerLost("p1", "silent"), WorkerLost("d1", "silent")]
    rig.step(finished(0))
    await rig.inbox.take(0)
    rig.dispatcher.worker_lost("d1", "silent")
    assert await rig.inbox.take(0) == []


async def test_take_waits_and_gives_up() -> None:
    rig = Rig()
    assert await rig.inbox.take(0.01) == []
    taking = asyncio.create_task(rig.inbox.take(5))
    await asyncio.sleep(0)
    rig.step(delta(0, 1))
    assert len(await taking) == 1


async def test_cancelled_take_loses_nothing() -> None:
    rig = Rig()
    taking = asyncio.create_task(rig.inbox.take(5))
    await asyncio.sleep(0)
    rig.step(delta(0, 1))
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    assert await rig.ids() == [1]


async def test_open_and_close() -> None:
    rig = Rig()
    with pytest.raises(ValueError, match="open already"):
        rig.dispatcher.open("r", 1)
    rig.dispatcher.close("r")
    rig.dispatcher.close("r")
    rig.step(delta(0, 1))
    assert len(rig.dispatcher) == 0 and rig.counts == {"unknown": 1}


async def test_fail_all_is_final_and_once() -> None:
    rig = Rig()
    rig.dispatcher.fail_all(Code.DRAINING, "bye")
    rig.dispatcher.fail_all(Code.DRAINING, "bye")
    (failed,) = await rig.inbox.take(0)
    assert isinstance(failed, Failed) and not failed.retryable
