"""Taking a prompt over from a prefill worker: reserve, pull offer by offer, confirm, and only then decode.

    Offer 0   -> reserve blocks for the whole prompt, pull blocks 0..31   (prefill computes 32..63 meanwhile)
    Offer 1   -> pull blocks 32..63
    Offer 2   -> pull the rest; confirm the lease; name the blocks

The last offer carries the first token, which the worker sends on as soon as the offer is here: prefill drew it from
its own KV, and no copy can make it wrong. Only what follows waits for the blocks.

Blocks that this worker has already are not pulled. Whatever goes wrong ends in HandoffFailed with nothing held:
the caller computes the prompt itself, so a half-written prompt is never decoded.
"""

from __future__ import annotations

import asyncio
import time

from opentelemetry.context import Context

from libs.engine.sequence import Sequence
from libs.transfer.interface import TransferError
from libs.wire import subjects
from libs.wire.messages import Offer, OfferFailed, Release
from libs.worker.host import Host
from libs.worker.pull import confirm

MAX_OFFERS = 4096  # more chunks than any prompt has; a flood beyond is a failed handoff
SPACE_POLL_S = 0.02


class HandoffFailed(TransferError):
    """The prompt did not come over whole."""


class Intake:
    """The offers of one request, in order of arrival."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Offer | OfferFailed] = asyncio.Queue(MAX_OFFERS)
        self._lease: Offer | None = None
        self._over = False
        self.awaits_offer = False  # all that have come are pulled, and the last one is not among them

    def put(self, offer: Offer | OfferFailed) -> bool:
        """False if the handoff is over, well or not: the offer is not for it."""
        if self._over:
            return False
        if self._lease is None and isinstance(offer, Offer):
            self._lease = offer
        if self._queue.full():
            self._queue.get_nowait()  # leaves a gap, which fails the handoff
        self._queue.put_nowait(offer)
        return True

    async def take_over(self, host: Host, seq: Sequence, context: Context) -> int:
        """Fills `seq` with the prompt's KV, confirmed; returns the tokens that were copied, the rest was here.

        Raises HandoffFailed, or lets a cancellation through; then `seq` holds nothing and the lease is given back.
        """
        done = False
        try:
            pulled = await self._pull_all(host, seq)
            assert self._lease is not None
            await confirm(
                host.bus, self._lease.pool, self._lease.lease_id, host.settings.pull_timeout_s, context
            )
            done = True
        except TransferError as error:
            raise HandoffFailed(error.message) from error
        finally:
            self._over = True
            if not done:
                host.kv.release(seq)
                if self._lease is not None:
                    release = Release(lease_id=self._lease.lease_id)
                    host.outbox.put(subjects.release(self._lease.pool.worker_id), release)
        host.kv.commit(seq)
        return pulled

    async def _pull_all(self, host: Host, seq: Sequence) -> int:
        offer = await self._next(seq)
        await self._reserve(host, seq)
        pulled = await self._pull(host, seq, offer)
        while offer.first is None:
            offer = await self._next(seq)
            pulled += await self._pull(host, seq, offer)
        return pulled

    async def _next(self, seq: Sequence) -> Offer:
        timeout_s = (seq.deadline_ns - time.time_ns()) / 1e9
        self.awaits_offer = self._queue.empty()
        try:
            async with asyncio.timeout(timeout_s):  # wait_for of 3.11 may swallow a cancellation
                offer = await self._queue.get()
        except TimeoutError:
            raise HandoffFailed("the deadline passed while waiting for prefill") from None
        finally:
            self.awaits_offer = False
        if isinstance(offer, OfferFailed):
            raise HandoffFailed(f"prefill failed: {offer.message} ({offer.code})")
        if self._lease is not None and offer.lease_id != self._lease.lease_id:
            raise HandoffFailed("offers of two leases")
        return offer

    async def _reserve(self, host: Host, seq: Sequence) -> None:
        """Own hits, and blocks for the whole prompt at once: two prompts that each hold half of the pool and
        wait for the other half would wait for ever. First come, first served."""
        async with host.room:
            while not host.engine.scheduler.reserve(seq):
                if time.time_ns() > seq.deadline_ns:
                    raise HandoffFailed(f"no room for {seq.num_prompt_tokens} tokens before the deadline")
                await asyncio.sleep(SPACE_POLL_S)

    async def _pull(self, host: Host, seq: Sequence, offer: Offer) -> int:
        """Copies the offered blocks that are not there yet; returns the tokens that came."""
        size = host.card.layout.block_size
        if offer.first_block * size > seq.num_computed:
            raise HandoffFailed(f"offer of block {offer.first_block} after {seq.num_computed} tokens: a gap")
        if offer.num_tokens > seq.num_prompt_tokens:
            raise HandoffFailed(f"offer of {offer.num_tokens} tokens for a prompt of {seq.num_prompt_tokens}")
        # Whole blocks of the offer that we hold. Those with a name are others' too: what is pulled is not confirmed
        # yet and must not be written over them, not even where the prompt's last token is still to be computed.
        have = max(seq.num_computed // size, len(seq.names)) - offer.first_block
        theirs = offer.block_ids[have:]
        start = offer.first_block + have
        ours = seq.blocks[start : start + len(theirs)]
        if offer.num_tokens > seq.num_computed:
            if len(theirs) != len(ours) or host.card.layout.blocks_for(offer.num_tokens) != start + len(
                theirs
            ):
                raise HandoffFailed("an offer whose blocks do not hold its tokens")
            copies = list(zip(theirs, ours, strict=True))
            await host.links.pull(offer.pool, copies, host.settings.pull_timeout_s)
            pulled = offer.num_tokens - seq.num_computed
            seq.num_computed = offer.num_tokens
            return pulled
        return 0
