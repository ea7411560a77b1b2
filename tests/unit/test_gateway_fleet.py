"""Who is alive, with a clock that the test turns."""

from __future__ import annotations

from typing import Any

from libs.wire.messages import Heartbeat, Load
from services.gateway.fleet import STOPPED_GRACE_S, Fleet, loss_after_s

LOSS_S = 2.0


def beat(worker_id: str = "d1", **fields: Any) -> Heartbeat:
    waiting = fields.pop("waiting", 0)
    defaults: dict[str, Any] = {
        "role": "decode",
        "epoch": 1,
        "model": "m",
        "model_fingerprint": "f",
        "layout": "l",
        "context_length": 100,
        "block_size": 16,
        "state": "serving",
        "load": Load(
            waiting=waiting, running=0, blocks_free=1, blocks_cached=0, blocks_total=1, queue_limit=1
        ),
    }
    return Heartbeat(worker_id=worker_id, **(defaults | fields))


class Rig:
    def __init__(self) -> None:
        self.lost: list[tuple[str, str]] = []
        self.fleet = Fleet("f", LOSS_S, lambda worker_id, reason: self.lost.append((worker_id, reason)))

    def pass_time(self, since_s: float, until_s: float) -> None:
        """Checks as often as the fleet wants to be checked."""
        now_s = since_s
        while now_s < until_s:
            self.fleet.check(now_s)
            now_s += self.fleet.check_interval_s


def test_silence_is_loss_and_is_told_once() -> None:
    rig = Rig()
    rig.fleet.hear(beat(), 0.0)
    rig.pass_time(0.0, LOSS_S)
    assert not rig.lost and not rig.fleet.problems()
    rig.pass_time(LOSS_S, 10.0)
    assert rig.lost == [("d1", "silent for 2 s")]
    assert rig.fleet.problems() and not rig.fleet.knows("d1")


def test_beats_keep_a_worker() -> None:
    rig = Rig()
    for second in range(10):
        rig.fleet.hear(beat(), float(second))
        rig.pass_time(float(second), second + 1.0)
    assert not rig.lost


def test_a_stalled_gateway_blames_nobody() -> None:
    rig = Rig()
    rig.fleet.hear(beat(), 0.0)
    rig.fleet.check(0.1)
    rig.fleet.check(30.0)  # this process stood still
    assert not rig.lost
    rig.pass_time(30.25, 40.0)
    assert len(rig.lost) == 1


def test_stopped_worker_has_a_moment_for_its_last_words() -> None:
    rig = Rig()
    rig.fleet.hear(beat(), 0.0)
    rig.fleet.hear(beat(state="stopped"), 1.0)
    assert rig.fleet.serving("decode") == [] and rig.fleet.reference is None
    rig.fleet.check(1.0 + STOPPED_GRACE_S / 2)
    assert not rig.lost
    rig.fleet.check(1.0 + STOPPED_GRACE_S * 1.5)
    assert rig.lost == [("d1", "stopped")]


def test_new_epoch_is_a_loss_and_an_old_one_is_ignored() -> None:
    rig = Rig()
    rig.fleet.hear(beat(epoch=5), 0.0)
    rig.fleet.hear(beat(epoch=6), 1.0)
    assert rig.lost == [("d1", "restarted")]
    rig.fleet.hear(beat(epoch=5, state="stopped"), 1.1)
    assert rig.fleet.serving("decode")


def test_placed_but_never_heard_worker_is_lost_in_time() -> None:
    rig = Rig()
    rig.fleet.watch("d9", 0.0)
    rig.fleet.watch("d9", 1.0)  # asking again does not prolong it
    assert rig.fleet.serving("decode") == [] and rig.fleet.reference is None
    rig.pass_time(0.0, 3.0)
    assert [worker_id for worker_id, _ in rig.lost] == ["d9"]


def test_foreign_model_is_refused_and_stays_so() -> None:
    rig = Rig()
    rig.fleet.hear(beat("d1", model_fingerprint="other"), 0.0)
    assert rig.fleet.has_refused and "another model" in rig.fleet.refusal("d1")
    assert rig.fleet.serving("decode") == [] and rig.fleet.count("decode") == 0
    assert any("d1" in problem for problem in rig.fleet.problems())


def test_first_layout_is_the_fleets_until_it_is_gone() -> None:
    rig = Rig()
    rig.fleet.hear(beat("p1", role="prefill", layout="m"), 0.0)
    assert not rig.fleet.refusal("p1")  # no decode worker yet to differ from
    rig.fleet.hear(beat("d1"), 0.0)
    rig.fleet.hear(beat("d2", layout="m"), 0.0)
    rig.fleet.hear(beat("p1", role="prefill", layout="m"), 0.1)
    assert rig.fleet.refusal("d2") and rig.fleet.refusal("p1") and not rig.fleet.refusal("d1")
    rig.fleet.hear(beat("d1", state="stopped"), 0.2)
    rig.fleet.check(1.0)
    rig.fleet.hear(beat("d2", layout="m"), 1.0)
    assert not rig.fleet.refusal("d2")
    reference = rig.fleet.reference
    assert reference is not None and reference.layout == "m"


def test_least_loaded_first_without_the_excluded() -> None:
    rig = Rig()
    for worker_id, waiting in (("d1", 3), ("d2", 1), ("d3", 2)):
        rig.fleet.hear(beat(worker_id, waiting=waiting), 0.0)
    rig.fleet.hear(beat("p1", role="prefill"), 0.0)
    order = [one.worker_id for one in rig.fleet.serving("decode", frozenset({"d3"}))]
    assert order == ["d2", "d1"]
    assert [one.worker_id for one in rig.fleet.serving("prefill")] == ["p1"]


def test_loss_time_follows_the_heartbeat() -> None:
    assert loss_after_s(0.1) == 2.0 and loss_after_s(2.0) == 8.0
