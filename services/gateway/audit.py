"""Finding messages that were lost on the way: a worker that has been quiet about a request is asked what it owes.

    decode owes nothing, or has sent more than has come   tokens or the end were lost: the answer is continued
    decode waits for an offer that nobody owes it         offers were lost: decode is told to compute, prefill to let go

NATS delivers at most once: what a server held when it died is gone, and nothing says so. A finding counts when two
audits in a row make it and nothing was heard in between, for an answer may stand behind the reply in another queue.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from libs.service.auditing import ask
from libs.service.bus import Bus
from libs.service.logs import get_logger
from libs.service.outbox import Outbox
from libs.wire import subjects
from libs.wire.errors import BatonError, Code
from libs.wire.messages import Abort, Debt, OfferFailed, Role
from services.gateway.dispatch import Dispatcher, Inbox

QUIET_S: Final = 2.0
INTERVAL_S: Final = 1.0
log = get_logger()


@dataclass(frozen=True, slots=True)
class Case:
    """A quiet request, as it was when the audit began."""

    request_id: str
    attempt: int
    next_seq: int
    decode: str
    prefill: str | None


@dataclass(frozen=True, slots=True)
class Finding:
    """What must have been lost: offers on their way to decode, or else tokens or the end on their way here."""

    problem: str
    of_offers: bool


class Auditor:
    """One per gateway. `run` never ends by itself: a worker that does not answer is the fleet's to judge."""

    def __init__(self, bus: Bus, outbox: Outbox, dispatcher: Dispatcher) -> None:
        self._bus = bus
        self._outbox = outbox
        self._dispatcher = dispatcher
        self._suspects: set[Case] = set()  # of the round before

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.audit()

    async def audit(self) -> None:
        """One round: asks about what is quiet, acts on what the round before had found, too."""
        inboxes = {_case(inbox): inbox for inbox in self._dispatcher.quiet(QUIET_S)}
        found = await self._find(list(inboxes))
        certain = self._suspects & found.keys()
        for case in certain:
            if _case(inboxes[case]) == case:
                self._act(case, found[case], inboxes[case])
        self._suspects = found.keys() - certain

    async def _find(self, cases: list[Case]) -> dict[Case, Finding]:
        debts = await self._ask([("decode", case.decode, case) for case in cases])
        found = {case: finding for case, debt in debts.items() if (finding := _tokens_lost(case, debt))}
        waiting = [case for case, debt in debts.items() if debt.awaits_offer and case not in found]
        offers = await self._ask([("prefill", case.prefill, case) for case in waiting if case.prefill])
        return found | {case: finding for case in waiting if (finding := _offer_lost(case, offers.get(case)))}

    async def _ask(self, questions: list[tuple[Role, str, Case]]) -> dict[Case, Debt]:
        """What the workers say; cases of those that do not answer are missing."""
        by_worker: defaultdict[tuple[Role, str], list[Case]] = defaultdict(list)
        for role, worker_id, case in questions:
            by_worker[role, worker_id].append(case)
        asked = [self._ask_one(subjects.audit(*worker), cases) for worker, cases in by_worker.items()]
        return {case: debt for debts in await asyncio.gather(*asked) for case, debt in debts}

    async def _ask_one(self, subject: str, cases: list[Case]) -> list[tuple[Case, Debt]]:
        attempts = [(case.request_id, case.attempt) for case in cases]
        try:
            debts = await ask(self._bus, subject, attempts, INTERVAL_S)
        except BatonError:
            return []
        return list(zip(cases, debts, strict=False))

    def _act(self, case: Case, finding: Finding, inbox: Inbox) -> None:
        log.warning("messages lost", request_id=case.request_id, attempt=case.attempt, found=finding.problem)
        if not finding.of_offers:
            inbox.lost(finding.problem)
            return
        failed = OfferFailed(
            request_id=case.request_id,
            attempt=case.attempt,
            code=Code.WORKER_LOST,
            message=finding.problem,
        )
        self._outbox.put(subjects.offer(case.decode), failed)
        if case.prefill is not None:  # nobody will pull what it holds
            abort = Abort(request_id=case.request_id, attempt=case.attempt)
            self._outbox.put(subjects.abort(case.prefill), abort)


def _case(inbox: Inbox) -> Case:
    return Case(inbox.request_id, inbox.attempt, inbox.next_seq, inbox.decode or "", inbox.prefill)


def _tokens_lost(case: Case, debt: Debt) -> Finding | None:
    if not debt.owed:
        return Finding(f"{case.decode} owes nothing more, and no end came", of_offers=False)
    if debt.num_sent > case.next_seq:
        text = f"{case.decode} has sent {debt.num_sent} tokens, and {case.next_seq} came"
        return Finding(text, of_offers=False)
    return None


def _offer_lost(case: Case, debt: Debt | None) -> Finding | None:
    """`debt` is the prefill worker's; None where there is no such worker, or it did not answer."""
    if case.prefill is None:
        return Finding("no prefill worker has the prompt", of_offers=True)
    if debt is not None and not debt.owed:
        return Finding(f"{case.prefill} owes no offer, and the last one did not come", of_offers=True)
    return None
