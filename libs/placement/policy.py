"""Where a prompt goes: longest prefix against load. Pure functions; the coordinator and a simulator run the same.

    decode   the worker with the lowest  requests + kv_weight * kv_use - hit_tokens / credit_tokens
    prefill  the worker with the lowest  missing_tokens + queued_tokens + fetch cost
             none where the decode worker, with what it can fetch, lacks so little that it computes the rest itself,
             unless a prefill worker has the first token sooner: one that holds what decode would have to fetch

Missing are the tokens that nobody holds: blocks of a peer or of the store are fetched, which is cheap and not free. So
every worker is nearly as good for a prompt that is known, and load decides: affinity gives way where a worker is busy,
and a hot prefix spreads over all of them.

Workers whose costs differ by no more than `slack_tokens` are as good as equal, and the one chosen longest ago gets
the prompt. Without that, the few tokens of a chat template that all prompts share would draw them all to the worker
that happened to serve the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from libs.placement.sources import pull_sources
from libs.placement.view import Prompt, Worker
from libs.wire.messages import Choice, Placement, Role


class Policy(Protocol):
    """Decides one placement. Must not keep state: all it may know is in its arguments."""

    def place(self, prompt: Prompt, workers: Sequence[Worker]) -> Placement | None:
        """A placement among `workers`; None when none of them may decode this prompt."""
        ...


@dataclass(frozen=True, slots=True)
class LongestPrefix:
    """The policy described above. The weights are judgements; each says what it stands for."""

    local_prefill_tokens: (
        int  # decode computes up to this many missing tokens itself, if it holds most of the prompt
    )
    slack_tokens: int = 64  # differences up to this are noise next to the cost of uneven load
    credit_tokens: int = 1024  # holding so much of a prefix outweighs one more request in the batch
    kv_weight: float = 16.0  # a full pool is as bad as this many more requests
    peer_cost: float = 0.02  # of computing a token: fetching its KV from a peer
    store_cost: float = 0.05  # the same from the store
    handoff_tokens: float = 16.0  # asking a second worker takes as long as computing so many
    num_alternatives: int = 3  # told with a placement

    def place(self, prompt: Prompt, workers: Sequence[Worker]) -> Placement | None:
        prompt = replace(prompt, peer_blocks=_best_run(prompt, workers))
        decoders = self._ranked(prompt, workers, "decode", self.decode_cost)
        if not decoders:
            return None
        prefillers = self._ranked(prompt, workers, "prefill", self.prefill_cost)
        decode = decoders[0][1]
        if not prefillers or self._computes_locally(prompt, decode, prefillers[0][0]):
            placement = _local(prompt, decode, workers, no_prefill_worker=not prefillers)
            return self._scored(placement, decoders)
        return self._scored(_remote(prompt, decode, prefillers[0][1], workers), prefillers)

    def decode_cost(self, prompt: Prompt, worker: Worker) -> float:
        """In requests: what the worker has, how full its pool would be, less what it already holds."""
        held = worker.hit_tokens / self.credit_tokens
        return worker.requests + self.kv_weight * worker.kv_use(prompt) - held

    def prefill_cost(self, prompt: Prompt, worker: Worker) -> float:
        """In tokens: those to compute before this prompt's last one is, and what fetching the others takes."""
        fetch = self.peer_cost * worker.peer_tokens(prompt) + self.store_cost * worker.store_tokens(prompt)
        return worker.missing_tokens(prompt) + worker.queued_tokens + fetch

    def _computes_locally(self, prompt: Prompt, decode: Worker, prefill_cost: float) -> bool:
        missing = decode.missing_tokens(prompt)
        if missing > self.local_prefill_tokens or missing * 2 >= prompt.num_tokens:
            return False
        fetched = decode.peer_tokens(prompt) + decode.store_tokens(prompt)
        return fetched == 0 or self.prefill_cost(prompt, decode) <= prefill_cost + self.handoff_tokens

    def _ranked(
        self,
        prompt: Prompt,
        workers: Sequence[Worker],
        role: Role,
        cost_of: Callable[[Prompt, Worker], float],
    ) -> list[tuple[float, Worker]]:
        """Workers of `role` that may take the prompt, with their costs; the one for it first."""
        costs = [(cost_of(prompt, worker), worker) for worker in _candidates(prompt, workers, role)]
        if not costs:
            return []
        unit = self.credit_tokens if role == "decode" else 1
        limit = min(cost for cost, _ in costs) + self.slack_tokens / unit

        def order(entry: tuple[float, Worker]) -> tuple[bool, int, float, str]:
            cost, worker = entry
            is_good = cost <= limit  # as good as the best: then it is its turn that counts
            return (not is_good, worker.last_chosen if is_good else 0, cost, worker.worker_id)

        return sorted(costs, key=order)

    def _scored(self, placement: Placement, ranked: list[tuple[float, Worker]]) -> Placement:
        others = ranked[1 : 1 + self.num_alternatives]
        return msgspec.structs.replace(
            placement,
            score=ranked[0][0],
            alternatives=tuple(Choice(worker_id=worker.worker_id, score=cost) for cost, worker in others),
        )


def _best_run(prompt: Prompt, workers: Sequence[Worker]) -> int:
    """Blocks of the prompt that the best of those holds who may be pulled from."""
    return max((worker.hit_blocks for worker in workers if worker.worker_id not in prompt.exclude), default=0)


def _candidates(prompt: Prompt, workers: Sequence[Worker], role: Role) -> list[Worker]:
    """Those that may take the prompt; ones that would refuse it only where all would."""
    able = [w for w in workers if w.role == role and not w.draining and w.worker_id not in prompt.exclude]
    able = [w for w in able if w.fits(prompt)] or able
    return [w for w in able if not w.saturated] or able


def _local(
    prompt: Prompt, decode: Worker, workers: Sequence[Worker], *, no_prefill_worker: bool
) -> Placement:
    missing = decode.missing_tokens(prompt)
    why = "no prefill worker" if no_prefill_worker else "the rest is held or fetched"
    return Placement(
        decode=decode.worker_id,
        prefill=None,
        decode_sources=pull_sources(prompt, decode, workers),
        store_blocks=prompt.store_blocks,
        decode_hit_blocks=decode.hit_blocks,
        prefill_hit_blocks=0,
        reason=f"local: decode lacks {missing} of {prompt.num_tokens} tokens, {why}; {_decode_load(prompt, decode)}",
        score=0.0,  # the caller ranks
    )


def _remote(prompt: Prompt, decode: Worker, prefill: Worker, workers: Sequence[Worker]) -> Placement:
    missing = prefill.missing_tokens(prompt)
    return Placement(
        decode=decode.worker_id,
        prefill=prefill.worker_id,
        prefill_sources=pull_sources(prompt, prefill, workers),
        store_blocks=prompt.store_blocks,
        decode_hit_blocks=decode.hit_blocks,
        prefill_hit_blocks=prefill.hit_blocks,
        reason=f"remote: prefill lacks {missing} of {prompt.num_tokens} tokens, {prefill.queued_tokens} queued; "
        + _decode_load(prompt, decode),
        score=0.0,  # the caller ranks
    )


def _decode_load(prompt: Prompt, decode: Worker) -> str:
    return f"decode has {decode.requests} requests, KV {decode.kv_use(prompt):.0%}"
