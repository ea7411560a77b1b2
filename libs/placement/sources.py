"""Which peer a chosen worker should pull a prompt's leading blocks from."""

from __future__ import annotations

from collections.abc import Sequence

from libs.placement.view import MIN_GAIN_BLOCKS, Prompt, Worker
from libs.wire.messages import Source


def pull_sources(prompt: Prompt, chosen: Worker, workers: Sequence[Worker]) -> tuple[Source, ...]:
    """The peer, of any role, that holds most of the prompt's start; empty where `chosen` has nearly as much.

    "Most" means at least `MIN_GAIN_BLOCKS` more than `chosen`. A draining peer serves only where its run beats the
    others' by as much. Among equals the one with least to do. One source, not several: a worker pulls from the
    longest, and where that fails it computes.
    """
    least = chosen.hit_blocks + MIN_GAIN_BLOCKS
    peers = [
        worker
        for worker in workers
        if worker.hit_blocks >= least
        and worker.worker_id != chosen.worker_id
        and worker.worker_id not in prompt.exclude
    ]
    if not peers:
        return ()
    best = min(peers, key=_preference)
    return (Source(worker_id=best.worker_id, num_blocks=best.hit_blocks),)


def _preference(peer: Worker) -> tuple[int, bool, int, str]:
    worth = peer.hit_blocks - (MIN_GAIN_BLOCKS - 1 if peer.draining else 0)
    return (-worth, peer.draining, peer.requests, peer.worker_id)
