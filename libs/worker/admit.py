"""From an accepted request to the engine: pull what a peer knows of the prompt, then submit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as Seq

from opentelemetry.context import Context

from libs.engine.sequence import Sequence
from libs.service.logs import get_logger
from libs.transfer.interface import TransferError
from libs.wire.messages import Source
from libs.worker.host import Host

log = get_logger()


async def pull_and_submit(host: Host, seq: Sequence, sources: Seq[Source], context: Context) -> int:
    """Gives `seq` to the engine, its prefix pulled if a peer has more of it. Raises RequestRefused.

    A failed pull is no failure: the engine computes. When cancelled, `seq` holds nothing any more.
    Returns when the wait for the engine began (ns since 1970).
    """
    try:
        if sources:
            await _pull(host, seq, sources, context)
        host.engine.submit(seq)
        return time.time_ns()
    except asyncio.CancelledError:
        host.kv.release(seq)
        raise


async def _pull(host: Host, seq: Sequence, sources: Seq[Source], context: Context) -> None:
    start_ns, pulled, error = time.time_ns(), 0, ""
    try:
        host.kv.admit(seq)
        pulled = await host.puller.pull(seq, sources, context)
    except TransferError as failure:
        error = failure.message
        log.warning("pull failed, computing instead", engine_id=seq.request_id, error=error)
    attributes: dict[str, str | int] = {"baton.pulled_tokens": pulled}
    if error:
        attributes["error.message"] = error
    host.telemetry.record("kv.pull", start_ns, time.time_ns(), context, attributes)
