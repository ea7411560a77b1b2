"""Whether a request can be done in time; then its way to the engine: fetch what others know of the prompt, then submit.

    own pool, at once  -->  a peer's pool  -->  the store  -->  the engine computes what is left

A fetch that fails is no failure: the engine computes more.
"""

from __future__ import annotations

import asyncio
import time

from opentelemetry.context import Context

from libs.engine.kv.names import block_names, root_name
from libs.engine.sequence import Sequence
from libs.service.logs import get_logger
from libs.transfer.interface import TransferError
from libs.wire.messages import Generate, Prefill
from libs.worker.host import Host
from libs.worker.pace import is_late, refuse_if_late

log = get_logger()


def check_time(
    host: Host, request: Generate | Prefill, waiting_tokens: int, ahead_s: float = 0.0, own_s: float = 0.0
) -> None:
    """Raises RequestRefused if the prompt would come too late behind `waiting_tokens` of others.

    `ahead_s` and `own_s` come on top, for other work. How much of it is cached is looked up only where that decides.
    """
    pace, deadline_ns = host.pace, request.deadline_ns
    ahead_s += pace.prompt_s(waiting_tokens)
    if is_late(ahead_s, own_s + pace.prompt_s(len(request.prompt)), deadline_ns):
        own_s += pace.prompt_s(_uncached_tokens(host, request))
        refuse_if_late(host.identity.worker_id, ahead_s, own_s, deadline_ns)


def _uncached_tokens(host: Host, request: Generate | Prefill) -> int:
    """As far as neither this worker nor one that it may ask, nor the store, is known to have them."""
    size = host.kv.block_size
    root = root_name(host.card.fingerprint, host.card.layout.fingerprint, request.tenant)
    own = len(host.kv.lookup(block_names(root, request.prompt, size)))
    others = max((source.num_blocks for source in request.sources), default=0)
    stored = request.store_blocks if host.loader is not None else 0
    return max(1, len(request.prompt) - max(own, others, stored) * size)


def fetches(host: Host, request: Generate | Prefill) -> bool:
    """Whether there is something to fetch before the engine begins."""
    return bool(request.sources) or (host.loader is not None and request.store_blocks > 0)


async def fetch_and_submit(host: Host, seq: Sequence, request: Generate | Prefill, context: Context) -> int:
    """Gives `seq` to the engine, its prefix fetched where others have more of it. Raises RequestRefused.

    When cancelled, `seq` holds nothing any more. Returns when the wait for the engine began (ns since 1970).
    """
    try:
        if fetches(host, request):
            await _fetch(host, seq, request, context)
        host.engine.submit(seq)
        return time.time_ns()
    except asyncio.CancelledError:
        host.kv.release(seq)
        raise


async def _fetch(host: Host, seq: Sequence, request: Generate | Prefill, context: Context) -> None:
    start_ns, error = time.time_ns(), ""
    host.kv.admit(seq)
    try:
        await host.puller.pull(seq, request.sources, context)
    except TransferError as failure:
        error = seq.miss = failure.message
        log.warning("pull failed, computing instead", engine_id=seq.request_id, error=error)
        host.kv.admit(seq)
    if host.loader is not None and request.store_blocks > len(seq.blocks):
        await host.loader.load(seq, request.store_blocks, context)
    attributes: dict[str, str | int] = {
        "baton.pulled_tokens": seq.num_from_peer,
        "baton.loaded_tokens": seq.num_from_store,
    }
    if seq.miss:
        attributes["error.message"] = seq.miss
    host.telemetry.record("kv.pull", start_ns, time.time_ns(), context, attributes)
