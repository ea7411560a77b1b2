"""What a placement asks of the workers in it, for the load accounting."""

from __future__ import annotations

from libs.placement.load import Share
from libs.placement.view import Prompt, Worker
from libs.wire.messages import Placement


def shares_of(prompt: Prompt, placement: Placement, workers: list[Worker]) -> dict[str, Share]:
    """What the placement asks of each worker. Blocks that are pulled are not computed."""
    by_id = {worker.worker_id: worker for worker in workers}
    decode = by_id[placement.decode]
    blocks = decode.blocks_for(prompt)
    sources = placement.decode_sources if placement.prefill is None else placement.prefill_sources
    computing = decode if placement.prefill is None else by_id[placement.prefill]
    fetched = [placement.store_blocks, *(source.num_blocks for source in sources)]
    held_blocks = max([computing.hit_blocks, *fetched])
    tokens = max(1, prompt.num_tokens - held_blocks * computing.block_size)
    shares = {decode.worker_id: Share(tokens=0, blocks=blocks)}
    shares[computing.worker_id] = Share(tokens=tokens, blocks=blocks)
    return shares
