"""The workers that are alive, by their heartbeats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from libs.wire.messages import Heartbeat


class Change(Enum):
    """What a heartbeat told."""

    SAME = "same"
    JOINED = "joined"
    RESTARTED = "restarted"  # the same id, a new process: what the old one held and owed is gone
    STOPPED = "stopped"
    IGNORED = "ignored"  # from a process that a newer one of the same id has replaced


@dataclass(frozen=True, slots=True)
class Kind:
    """What workers must share before they can serve one request together."""

    model_fingerprint: str
    layout: str
    block_size: int  # tokens

    @classmethod
    def of(cls, heartbeat: Heartbeat) -> Kind:
        return cls(heartbeat.model_fingerprint, heartbeat.layout, heartbeat.block_size)


@dataclass(slots=True)
class Member:
    """A live worker: its last heartbeat, and when it came (seconds on the coordinator's own clock)."""

    heartbeat: Heartbeat
    seen_s: float


class Fleet:
    """Workers heard of within `loss_s`. One that said it stopped is out at once."""

    def __init__(self, loss_s: float) -> None:
        self.loss_s = loss_s
        self._members: dict[str, Member] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Heartbeat]:
        return (member.heartbeat for member in self._members.values())

    def beat(self, heartbeat: Heartbeat, now_s: float) -> Change:
        """Takes in a heartbeat."""
        worker_id = heartbeat.worker_id
        known = self._members.get(worker_id)
        if known is not None and heartbeat.epoch < known.heartbeat.epoch:
            return Change.IGNORED
        if heartbeat.state == "stopped":
            return Change.STOPPED if self._members.pop(worker_id, None) else Change.IGNORED
        self._members[worker_id] = Member(heartbeat, now_s)
        if known is None:
            return Change.JOINED
        return Change.SAME if known.heartbeat.epoch == heartbeat.epoch else Change.RESTARTED

    def take_lost(self, now_s: float) -> list[str]:
        """Removes and names the workers that have been silent for longer than `loss_s`."""
        lost = [id_ for id_, member in self._members.items() if now_s - member.seen_s > self.loss_s]
        for worker_id in lost:
            del self._members[worker_id]
        return lost

    def forgive(self, now_s: float) -> None:
        """Counts everybody's silence from now on: it was this process that could not hear."""
        for member in self._members.values():
            member.seen_s = now_s

    def kind(self) -> Kind | None:
        """The model and layout that is served: the one with a decode worker and most workers; None without workers.

        All workers should be of one kind. Where they are not, somebody has mixed configurations; equal numbers are
        settled by who has been there longest, so that one stray newcomer cannot take over.
        """
        votes: dict[Kind, tuple[bool, int, int]] = {}
        for heartbeat in self:
            decodes, count, oldest = votes.get(Kind.of(heartbeat), (False, 0, -heartbeat.epoch))
            votes[Kind.of(heartbeat)] = (
                decodes or heartbeat.role == "decode",
                count + 1,
                max(oldest, -heartbeat.epoch),
            )
        return max(votes, key=votes.__getitem__, default=None)

    def usable(self) -> list[Heartbeat]:
        """Workers of the kind that is served, draining ones included."""
        kind = self.kind()
        return [heartbeat for heartbeat in self if Kind.of(heartbeat) == kind]

    def strays(self) -> list[Heartbeat]:
        """Workers of any other kind: they get nothing to do."""
        kind = self.kind()
        return [heartbeat for heartbeat in self if Kind.of(heartbeat) != kind]
