"""Where a prompt goes: longest prefix against load. Pure functions; the coordinator and a simulator run the same.

    decode   the worker with the lowest  requests + kv_weight * kv_use - hit_tokens / credit_tokens
    prefill  the worker with the lowest  missing_tokens + queued_tokens
             none where the decode worker lacks so little that it computes the rest itself

Workers whose costs differ by no more than `slack_tokens` are as good as equal, and the one chosen longest ago gets
the prompt. Without that, the few tokens of a chat template that all prompts share would draw them all to the worker
that happened to serve the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from libs.placement.sources import pull_sources
from libs.placement.view import Prompt, Worker
from libs.wire.messages import Placement, Role


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

    def place(self, prompt: Prompt, workers: Sequence[Worker]) -> Placement | None:
        decode, decode_cost = self._choose(prompt, workers, "decode", self.decode_cost)
        if decode is None:
            return None
        prefill, prefill_cost = self._choose(prompt, workers, "prefill", self.prefill_cost)
        if prefill is None or self._computes_locally(prompt, decode):
            return _local(prompt, decode, decode_cost, workers, no_prefill_worker=prefill is None)
        return _remote(prompt, decode, prefill, prefill_cost, workers)

    def decode_cost(self, prompt: Prompt, worker: Worker) -> float:
        """In requests: what the worker has, how full its pool would be, less what it already holds."""
        held = worker.hit_tokens / self.credit_tokens
        return worker.requests + self.kv_weight * worker.kv_use(prompt) - held

    def prefill_cost(self, prompt: Prompt, worker: Worker) -> float:
        """In tokens: those to compute before this prompt's last one is."""
        return float(worker.missing_tokens(prompt) + worker.queued_tokens)

    def _computes_locally(self, prompt: Prompt, decode: Worker) -> bool:
        missing = decode.missing_tokens(prompt)
        return missing <= self.local_prefill_tokens and missing * 2 < prompt.num_tokens

    def _choose(
        self,
        prompt: Prompt,
        workers: Sequence[Worker],
        role: Role,
        cost_of: Callable[[Prompt, Worker], float],
    ) -> tuple[Worker | None, float]:
        """The worker of `role` for the prompt, and its cost."""
        costs = [(cost_of(prompt, worker), worker) for worker in _candidates(prompt, workers, role)]
        if not costs:
            return None, 0.0
        unit = self.credit_tokens if role == "decode" else 1
        limit = min(cost for cost, _ in costs) + self.slack_tokens / unit
        cost, worker = min(
            (entry for entry in costs if entry[0] <= limit),
            key=lambda entry: (entry[1].last_chosen, entry[0], entry[1].worker_id),
        )
        return worker, cost


def _candidates(prompt: Prompt, workers: Sequence[Worker], role: Role) -> list[Worker]:
    """Those that may take the prompt; ones that would refuse it only where all would."""
    able = [w for w in workers if w.role == role and not w.draining and w.worker_id not in prompt.exclude]
    able = [w for w in able if w.fits(prompt)] or able
    return [w for w in able if not w.saturated] or able


def _local(
    prompt: Prompt, decode: Worker, cost: float, workers: Sequence[Worker], *, no_prefill_worker: bool
) -> Placement:
    missing = decode.missing_tokens(prompt)
    why = "no prefill worker" if no_prefill_worker else "it holds the rest"
    return Placement(
        decode=decode.worker_id,
        prefill=None,
        decode_sources=pull_sources(prompt, decode, workers),
        decode_hit_blocks=decode.hit_blocks,
        prefill_hit_blocks=0,
        reason=f"local: decode lacks {missing} of {prompt.num_tokens} tokens, {why}; {_decode_load(prompt, decode)}",
        score=cost,
    )


def _remote(
    prompt: Prompt, decode: Worker, prefill: Worker, cost: float, workers: Sequence[Worker]
) -> Placement:
    missing = prefill.missing_tokens(prompt)
    return Placement(
        decode=decode.worker_id,
        prefill=prefill.worker_id,
        prefill_sources=pull_sources(prompt, prefill, workers),
        decode_hit_blocks=decode.hit_blocks,
        prefill_hit_blocks=prefill.hit_blocks,
        reason=f"remote: prefill lacks {missing} of {prompt.num_tokens} tokens, {prefill.queued_tokens} queued; "
        + _decode_load(prompt, decode),
        score=cost,
    )


def _decode_load(prompt: Prompt, decode: Worker) -> str:
    return f"decode has {decode.requests} requests, KV {decode.kv_use(prompt):.0%}"
