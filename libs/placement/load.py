"""What each worker has to do, counted from the moment a request is sent there.

Heartbeats alone come too late: a burst would go to whoever was idle half a second ago. Own counts alone miss what
other coordinators, or gateways without one, have sent. So of each report only the surplus over the own count at
that moment is added:

    load of a worker = requests this coordinator sent there and that have not ended
                     + max(0, requests in its last report - own count when the report came)

A request stops counting when its gateway says Done, when its worker is lost, or when its own deadline has passed.
It counts as gone when it was sent longer ago than a message can take and the worker reports fewer requests than
that: a prefill worker is done long before the request is, and a gateway may die without a word. Which of several are
gone is a guess (the oldest); how many is not, so counts never fall below what a worker really holds of ours.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from libs.wire.messages import Load

FOREIGN_REQUEST_TOKENS = 512  # a request that another sent: its prompt is unknown, say one engine step
ENDED_MEMORY_S = 30.0  # a Done may overtake the Route that it ends
MAX_ENDED = 65_536


@dataclass(frozen=True, slots=True)
class Share:
    """What one request asks of one worker."""

    tokens: int  # of the prompt, to compute there
    blocks: int  # that the prompt occupies


@dataclass(frozen=True, slots=True)
class Standing:
    """One worker's load as placement sees it."""

    requests: int = 0
    queued_tokens: int = 0
    blocks_used: int = 0
    last_chosen: int = 0


@dataclass(slots=True)
class _Account:
    """One worker. Shares are in the order in which they were sent, each with when (seconds)."""

    shares: dict[str, tuple[Share, float]] = field(default_factory=dict)
    gone: dict[str, None] = field(default_factory=dict)  # of `shares`: they no longer count
    judged_s: float = float("-inf")  # the last report told of all that was sent before
    tokens: int = 0  # of the shares that count
    blocks: int = 0
    foreign_requests: int = 0
    foreign_blocks: int = 0
    last_chosen: int = 0

    @property
    def num_counted(self) -> int:
        return len(self.shares) - len(self.gone)

    def add(self, request_id: str, share: Share, now_s: float) -> None:
        self.shares[request_id] = (share, now_s)
        self._count(share, 1)

    def remove(self, request_id: str) -> None:
        share, sent_s = self.shares.pop(request_id)
        if request_id in self.gone:
            del self.gone[request_id]
            return
        self._count(share, -1)
        if self.gone and sent_s < self.judged_s:  # so one that we took for gone may be the one that is there
            revived, _ = self.gone.popitem()
            self._count(self.shares[revived][0], 1)

    def judge(self, reported: int, judged_s: float) -> None:
        """Of what was sent before `judged_s`, no more than `reported` requests can still be there."""
        for request_id in self.gone:
            self._count(self.shares[request_id][0], 1)
        old = [request_id for request_id, (_, sent_s) in self.shares.items() if sent_s < judged_s]
        self.gone = dict.fromkeys(old[: max(0, len(old) - reported)])
        for request_id in self.gone:
            self._count(self.shares[request_id][0], -1)
        self.judged_s = judged_s

    def _count(self, share: Share, sign: int) -> None:
        self.tokens += sign * share.tokens
        self.blocks += sign * share.blocks


class InFlight:
    """The requests that this coordinator has placed and that have not ended. All times are on one clock, in seconds."""

    def __init__(self, *, settle_s: float, expire_s: float) -> None:
        """`settle_s`: what was sent longer ago is in the worker's reports; `expire_s`: no request lives longer."""
        self._settle_s = settle_s
        self._expire_s = expire_s
        self._accounts: dict[str, _Account] = {}
        self._requests: OrderedDict[str, tuple[tuple[str, ...], float]] = OrderedDict()  # workers, expiry
        self._ended: OrderedDict[str, float] = OrderedDict()
        self._decisions = 0

    @property
    def num_requests(self) -> int:
        """Placed and not over, as far as can be told: those that are still with one of their workers."""
        return sum(
            any(request_id not in self._accounts[worker_id].gone for worker_id in workers)
            for request_id, (workers, _) in self._requests.items()
        )

    def dispatch(self, request_id: str, shares: Mapping[str, Share], now_s: float) -> None:
        """Counts a placed request, in place of an earlier placement of the same one."""
        self._decisions += 1
        self._drop(request_id)
        for worker_id in shares:
            self._account(worker_id).last_chosen = self._decisions
        if request_id in self._ended:
            return
        for worker_id, share in shares.items():
            self._account(worker_id).add(request_id, share, now_s)
        self._requests[request_id] = (tuple(shares), now_s + self._expire_s)

    def end(self, request_id: str, now_s: float) -> None:
        """The request is over. Idempotent, and also right when it comes before `dispatch`."""
        self._drop(request_id)
        self._ended[request_id] = now_s + ENDED_MEMORY_S
        self._ended.move_to_end(request_id)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def lose(self, worker_id: str) -> None:
        """The worker's process is gone, and all it had to do."""
        account = self._accounts.pop(worker_id, None)
        for request_id in account.shares if account else ():
            workers, expires_s = self._requests[request_id]
            left = tuple(other for other in workers if other != worker_id)
            self._requests[request_id] = (left, expires_s)

    def report(self, worker_id: str, load: Load, now_s: float) -> None:
        """Settles the own count with what the worker says of itself."""
        account = self._account(worker_id)
        reported = load.waiting + load.running
        account.judge(reported, now_s - self._settle_s)
        used = load.blocks_total - load.blocks_free - load.blocks_cached
        account.foreign_requests = max(0, reported - account.num_counted)
        account.foreign_blocks = max(0, used - account.blocks)

    def expire(self, now_s: float) -> int:
        """Drops requests whose deadline has passed; returns how many. Their gateway died, or its Done was lost."""
        expired = 0
        while self._requests and next(iter(self._requests.values()))[1] <= now_s:
            self._drop(next(iter(self._requests)))
            expired += 1
        while self._ended and next(iter(self._ended.values())) <= now_s:
            self._ended.popitem(last=False)
        return expired

    def of(self, worker_id: str) -> Standing:
        account = self._accounts.get(worker_id)
        if account is None:
            return Standing()
        return Standing(
            requests=account.num_counted + account.foreign_requests,
            queued_tokens=account.tokens + account.foreign_requests * FOREIGN_REQUEST_TOKENS,
            blocks_used=account.blocks + account.foreign_blocks,
            last_chosen=account.last_chosen,
        )

    def _account(self, worker_id: str) -> _Account:
        return self._accounts.setdefault(worker_id, _Account())

    def _drop(self, request_id: str) -> None:
        workers, _ = self._requests.pop(request_id, ((), 0.0))
        for worker_id in workers:
            self._accounts[worker_id].remove(request_id)
