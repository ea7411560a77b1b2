"""In-flight counts and the fleet: nothing is counted twice, nothing is lost, nothing stays."""

from __future__ import annotations

import random

import pytest

from libs.placement.load import FOREIGN_REQUEST_TOKENS, MAX_ENDED, InFlight, Share, Standing
from libs.wire.messages import Heartbeat, Load
from services.cache.fleet import Change, Fleet

SHARE = Share(tokens=100, blocks=7)


def load(waiting: int = 0, running: int = 0, used: int = 0) -> Load:
    return Load(waiting=waiting, running=running, blocks_free=90 - used, blocks_cached=10, blocks_total=100,
                queue_limit=8)  # fmt: skip


def book() -> InFlight:
    return InFlight(settle_s=2.0, expire_s=600.0)


def test_a_request_counts_from_dispatch_to_done_exactly_once() -> None:
    counts = book()
    counts.dispatch("r", {"d": SHARE}, 0.0)
    assert counts.of("d") == Standing(requests=1, queued_tokens=100, blocks_used=7, last_chosen=1)
    counts.report("d", load(waiting=1, used=7), 0.5)  # the worker tells of the same request
    assert counts.of("d") == Standing(requests=1, queued_tokens=100, blocks_used=7, last_chosen=1)
    counts.end("r", 1.0)
    counts.end("r", 1.0)
    assert counts.of("d") == Standing(last_chosen=1) and counts.num_requests == 0


def test_what_others_sent_is_added_and_goes_with_the_next_report() -> None:
    counts = book()
    counts.dispatch("r", {"p": SHARE}, 0.0)
    counts.report("p", load(waiting=2, running=1, used=20), 0.5)
    assert counts.of("p") == Standing(3, 100 + 2 * FOREIGN_REQUEST_TOKENS, 20, 1)
    counts.dispatch("s", {"p": SHARE}, 0.6)  # not in that report yet
    assert counts.of("p").requests == 4
    counts.report("p", load(running=2, used=14), 1.0)
    assert counts.of("p") == Standing(2, 200, 14, 2)


def test_a_report_that_was_sent_before_the_request_arrived_takes_nothing_away() -> None:
    counts = book()
    counts.dispatch("r", {"d": SHARE}, 0.0)
    for now_s in (0.01, 0.5, 1.0, 1.99):
        counts.report("d", load(), now_s)
        assert counts.of("d").requests == 1


def test_what_the_worker_no_longer_holds_is_settled_oldest_first() -> None:
    counts = book()
    for number in range(3):
        counts.dispatch(f"r{number}", {"p": Share(10**number, 1), "d": SHARE}, float(number))
    counts.report(
        "p", load(running=1), 3.5
    )  # r0 and r1 are old enough to be judged; one of the three is held
    assert counts.of("p").queued_tokens == 110
    counts.report("p", load(running=1), 4.5)
    assert counts.of("p").queued_tokens == 100
    assert counts.of("d").requests == 3 and counts.num_requests == 3  # decode has them still
    counts.report("p", load(), 5.0)
    counts.report("d", load(), 5.0)
    assert counts.num_requests == 0 and counts.of("d").requests == 0


def test_done_that_overtakes_its_route_leaves_nothing_behind() -> None:
    counts = book()
    counts.end("r", 0.0)
    counts.dispatch("r", {"d": SHARE}, 0.1)
    assert counts.of("d").requests == 0 and counts.num_requests == 0


def test_placing_again_moves_the_count() -> None:
    counts = book()
    counts.dispatch("r", {"d1": SHARE, "p": SHARE}, 0.0)
    counts.dispatch("r", {"d2": SHARE, "p": SHARE}, 1.0)
    assert [counts.of(each).requests for each in ("d1", "d2", "p")] == [0, 1, 1]
    counts.end("r", 2.0)
    assert [counts.of(each).requests for each in ("d1", "d2", "p")] == [0, 0, 0]


def test_a_lost_worker_takes_its_counts_along_and_done_still_ends_the_rest() -> None:
    counts = book()
    counts.dispatch("r", {"d": SHARE, "p": SHARE}, 0.0)
    counts.lose("p")
    counts.lose("p")
    assert counts.of("p") == Standing() and counts.of("d").requests == 1
    counts.end("r", 1.0)
    assert counts.of("d").requests == 0


def test_a_gateway_that_died_does_not_load_workers_for_ever() -> None:
    counts = book()
    counts.dispatch("r", {"d": SHARE}, 0.0)
    counts.dispatch("s", {"d": SHARE}, 1.0)
    assert counts.expire(599.9) == 0
    assert counts.expire(600.0) == 1
    assert counts.of("d").requests == 1


def test_memory_of_ended_requests_is_bounded() -> None:
    counts = book()
    for number in range(MAX_ENDED + 10):
        counts.end(f"r{number}", 0.0)
    assert len(counts._ended) == MAX_ENDED
    counts.expire(31.0)
    assert len(counts._ended) == 0


@pytest.mark.parametrize("seed", range(30))
def test_counts_never_fall_below_what_workers_hold_and_end_at_zero(seed: int) -> None:
    """Requests arrive within a second, end in any order, are cancelled anywhere; Done comes late or twice."""
    rng = random.Random(seed)
    counts, workers, now_s = book(), ["d1", "d2"], 0.0
    ours: dict[str, tuple[str, float]] = {}  # not ended: worker, and when it arrives there
    mail: list[tuple[float, str]] = []  # Done under way: when it comes, and for which

    def held(worker_id: str) -> int:
        return sum(worker == worker_id and arrives_s <= now_s for worker, arrives_s in ours.values())

    for number in range(300):
        now_s += rng.random() * 0.2
        request_id, worker_id = f"r{number}", rng.choice(workers)
        cancelled = rng.random() < 0.1
        if cancelled:
            counts.end(request_id, now_s)  # while Route was on its way
        else:
            ours[request_id] = (worker_id, now_s + rng.random())
        counts.dispatch(request_id, {worker_id: SHARE}, now_s)
        for other in [other for other in ours if rng.random() < 0.1]:
            del ours[other]
            mail += [(now_s + 4 * rng.random(), other)] * rng.choice((0, 1, 1, 2))
        for due in [entry for entry in mail if entry[0] <= now_s]:
            mail.remove(due)
            counts.end(due[1], now_s)
        for each in workers:
            if rng.random() < 0.3:
                counts.report(each, load(running=held(each)), now_s)
            assert counts.of(each).requests >= held(each)
    for request_id in [*ours, *(request_id for _, request_id in mail)]:
        counts.end(request_id, now_s)
    for each in workers:
        counts.report(each, load(), now_s + 2.1)
        standing = counts.of(each)
        assert (standing.requests, standing.queued_tokens, standing.blocks_used) == (0, 0, 0)
    assert counts.num_requests == 0


def test_a_wrong_guess_of_who_is_gone_is_taken_back() -> None:
    counts = book()
    counts.dispatch("long", {"p": Share(8000, 500)}, 0.0)
    counts.dispatch("short", {"p": Share(10, 1)}, 0.0)
    counts.report("p", load(running=1), 3.0)  # "short" is through, and "long" is taken for it
    assert counts.of("p").requests == 1
    counts.end("short", 3.1)
    assert counts.of("p").requests == 1 and counts.of("p").queued_tokens == 8000


def beat(
    worker_id: str, *, epoch: int = 1, role: str = "decode", model: str = "m", state: str = "serving"
) -> Heartbeat:
    return Heartbeat(worker_id=worker_id, role=role, epoch=epoch, model="name", model_fingerprint=model,
                     layout="l", context_length=8192, block_size=16, load=load(), state=state)  # type: ignore[arg-type]  # fmt: skip


def test_fleet_loses_the_silent_and_those_alone() -> None:
    fleet = Fleet(loss_s=2.0)
    assert fleet.beat(beat("d1"), 0.0) is Change.JOINED
    fleet.beat(beat("d2"), 0.0)
    assert fleet.beat(beat("d1"), 1.0) is Change.SAME
    assert fleet.take_lost(2.0) == []
    assert fleet.take_lost(2.5) == ["d2"]
    assert [each.worker_id for each in fleet] == ["d1"]
    assert fleet.beat(beat("d2"), 3.0) is Change.JOINED


def test_fleet_knows_lives_apart() -> None:
    fleet = Fleet(loss_s=2.0)
    fleet.beat(beat("d", epoch=5), 0.0)
    assert fleet.beat(beat("d", epoch=6), 1.0) is Change.RESTARTED
    assert fleet.beat(beat("d", epoch=5), 2.9) is Change.IGNORED  # an old message does not keep it alive
    assert fleet.take_lost(3.1) == ["d"]
    assert (
        fleet.beat(beat("d", epoch=5), 3.2) is Change.JOINED
    )  # the machine's clock went back: it is what there is
    assert fleet.beat(beat("d", epoch=5, state="stopped"), 3.3) is Change.STOPPED
    assert fleet.beat(beat("d", epoch=5, state="stopped"), 3.4) is Change.IGNORED
    assert len(fleet) == 0


def test_fleet_serves_the_kind_most_workers_have_if_it_can_decode() -> None:
    fleet = Fleet(loss_s=2.0)
    assert fleet.kind() is None and fleet.usable() == []
    fleet.beat(beat("d1", model="a", epoch=10), 0.0)
    fleet.beat(beat("d2", model="b", epoch=11), 0.0)
    assert [each.worker_id for each in fleet.usable()] == ["d1"]  # a draw: the older
    fleet.beat(beat("p1", model="b", role="prefill"), 0.0)
    assert sorted(each.worker_id for each in fleet.usable()) == ["d2", "p1"]
    assert [each.worker_id for each in fleet.strays()] == ["d1"]
    for number in range(5):
        fleet.beat(beat(f"q{number}", model="c", role="prefill"), 0.0)
    assert "d2" in {each.worker_id for each in fleet.usable()}  # five that cannot decode do not outvote
