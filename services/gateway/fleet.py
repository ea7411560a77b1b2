"""The workers that are alive, as their heartbeats tell.

A worker is lost when it is silent for `loss_after_s`, says that it stopped, or comes back as another process
(a new epoch). A worker with another model, or whose KV has another layout than the rest, is not used at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from libs.service.logs import get_logger
from libs.wire.messages import Heartbeat, Role

STOPPED_GRACE_S: Final = 0.25  # last outputs may stand behind the last heartbeat in another subscription
log = get_logger()


def loss_after_s(heartbeat_s: float) -> float:
    """How long a worker may be silent before it counts as dead."""
    return max(2.0, 4 * heartbeat_s)


@dataclass(slots=True)
class _Worker:
    seen_s: float  # monotonic
    beat: Heartbeat | None = None  # None: placed by others, not heard yet
    refusal: str = ""  # why it must not be used


class Fleet:
    """All times are monotonic seconds, given by the caller. `on_lost(worker_id, reason)` is called once per loss."""

    def __init__(
        self, model_fingerprint: str, loss_after_s: float, on_lost: Callable[[str, str], None]
    ) -> None:
        self._fingerprint = model_fingerprint
        self._loss_after_s = loss_after_s
        self._on_lost = on_lost
        self._workers: dict[str, _Worker] = {}
        self._checked_s: float | None = None

    def hear(self, beat: Heartbeat, now_s: float) -> None:
        """Takes in a heartbeat."""
        worker = self._workers.setdefault(beat.worker_id, _Worker(now_s))
        if worker.beat is not None and beat.epoch < worker.beat.epoch:
            return  # from a former life
        if worker.beat is not None and beat.epoch > worker.beat.epoch:
            self._on_lost(beat.worker_id, "restarted")
        is_news = worker.beat is None or worker.beat.epoch != beat.epoch
        worker.beat, worker.seen_s = beat, now_s
        worker.refusal = self._refusal(beat)
        if worker.refusal and is_news:
            log.warning("worker refused", worker_id=beat.worker_id, reason=worker.refusal)
        if beat.state == "stopped":
            worker.seen_s = now_s - self._loss_after_s + STOPPED_GRACE_S

    def watch(self, worker_id: str, now_s: float) -> None:
        """A request was given to this worker: if it is not known, it has to be heard from in time, too."""
        self._workers.setdefault(worker_id, _Worker(now_s))

    def check(self, now_s: float) -> None:
        """Declares silent workers lost. If this process itself was stalled, nobody is blamed for the gap."""
        interval_s = self._loss_after_s / 8
        if self._checked_s is not None and now_s - self._checked_s > 2 * interval_s:
            for worker in self._workers.values():
                worker.seen_s += now_s - self._checked_s - interval_s
        self._checked_s = now_s
        for worker_id, worker in list(self._workers.items()):
            if now_s - worker.seen_s > self._loss_after_s:
                del self._workers[worker_id]
                stopped = worker.beat is not None and worker.beat.state == "stopped"
                reason = "stopped" if stopped else f"silent for {self._loss_after_s:g} s"
                log.info("worker gone", worker_id=worker_id, reason=reason)
                self._on_lost(worker_id, reason)

    @property
    def check_interval_s(self) -> float:
        """How often `check` wants to be called."""
        return self._loss_after_s / 8

    def knows(self, worker_id: str) -> bool:
        return worker_id in self._workers

    def refusal(self, worker_id: str) -> str:
        """Why a worker must not be used; empty for those that may, and for those not heard yet."""
        worker = self._workers.get(worker_id)
        return worker.refusal if worker is not None else ""

    def serving(self, role: Role, exclude: frozenset[str] = frozenset()) -> list[Heartbeat]:
        """Last heartbeats of the workers that take new requests, least loaded first."""
        beats = [
            worker.beat
            for worker in self._workers.values()
            if worker.beat is not None
            and worker.beat.state == "serving"
            and worker.beat.role == role
            and not worker.refusal
            and worker.beat.worker_id not in exclude
        ]
        return sorted(beats, key=lambda beat: beat.load.waiting + beat.load.running)

    @property
    def has_refused(self) -> bool:
        """Workers are there that must not be used."""
        return any(worker.refusal for worker in self._workers.values())

    @property
    def reference(self) -> Heartbeat | None:
        """A live decode worker, whose layout and block size names are made with. None: there is no decode worker."""
        return next(iter(self._usable()), None)

    def count(self, role: Role) -> int:
        """Live, usable workers of a role, draining ones included."""
        return sum(1 for beat in self._usable(role))

    def problems(self) -> list[str]:
        """What keeps this fleet from serving; empty when it can."""
        found = [f"{name}: {one.refusal}" for name, one in sorted(self._workers.items()) if one.refusal]
        return [] if self.serving("decode") else ["no decode worker is serving", *found]

    def _usable(self, role: Role = "decode") -> list[Heartbeat]:
        """In order of arrival, so that the fleet's layout does not change while a worker with it lives."""
        return [
            worker.beat
            for worker in self._workers.values()
            if worker.beat is not None
            and worker.beat.role == role
            and not worker.refusal
            and worker.beat.state != "stopped"
        ]

    def _refusal(self, beat: Heartbeat) -> str:
        if beat.model_fingerprint != self._fingerprint:
            return f"serves another model ({beat.model!r}, fingerprint {beat.model_fingerprint[:12]})"
        reference = self.reference
        if reference is not None and (beat.layout, beat.block_size) != (
            reference.layout,
            reference.block_size,
        ):
            return f"its KV layout {beat.layout} is not the {reference.layout} of {reference.worker_id}"
        return ""
