"""What placement looks at: one prompt, and every worker as the coordinator sees it. Plain data, no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from libs.wire.messages import Role

MIN_GAIN_BLOCKS = 2  # a pull costs round trips; one block is as quickly computed


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt to place. `exclude` names workers that just failed this very request.

    `store_blocks` and `peer_blocks` are the prompt's leading blocks that the durable store, and the best of all
    workers, hold: whoever is chosen can fetch them.
    """

    num_tokens: int
    exclude: frozenset[str] = frozenset()
    store_blocks: int = 0
    peer_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Worker:
    """One live worker. Counts include what was dispatched to it and has not shown in its heartbeats yet.

    All workers handed to one decision serve the same model in the same KV layout, so any of them can be
    pulled from.
    """

    worker_id: str
    role: Role
    block_size: int  # tokens
    hit_blocks: int  # the prompt's leading blocks that it holds, without a hole
    requests: int  # waiting or running
    queued_tokens: int  # prompt tokens that it was given and still has to compute
    blocks_used: int  # blocks that live requests occupy; cached ones can be taken and do not count
    blocks_total: int
    saturated: bool = False  # its queue is full: it would refuse
    draining: bool = False  # takes no new request, but its blocks can be pulled until it stops
    last_chosen: int = 0  # number of the decision that chose it last; the smaller has waited longer

    @property
    def hit_tokens(self) -> int:
        return self.hit_blocks * self.block_size

    def peer_blocks(self, prompt: Prompt) -> int:
        """Leading blocks that stand here when those of the best peer have been pulled, if that is worth it."""
        gain = prompt.peer_blocks - self.hit_blocks
        return prompt.peer_blocks if gain >= MIN_GAIN_BLOCKS else self.hit_blocks

    def missing_tokens(self, prompt: Prompt) -> int:
        """Prompt tokens to compute here, when all that is held elsewhere has been fetched.

        At least one: the last token's logits are never cached.
        """
        held = max(self.peer_blocks(prompt), prompt.store_blocks)
        return max(1, prompt.num_tokens - held * self.block_size)

    def peer_tokens(self, prompt: Prompt) -> int:
        """Prompt tokens to fetch from a peer."""
        return (self.peer_blocks(prompt) - self.hit_blocks) * self.block_size

    def store_tokens(self, prompt: Prompt) -> int:
        """Prompt tokens to fetch from the store, after those that a peer has."""
        return max(0, prompt.store_blocks - self.peer_blocks(prompt)) * self.block_size

    def kv_use(self, prompt: Prompt) -> float:
        """Share of the pool that live requests would occupy with this prompt among them; above 1 it must wait."""
        new_blocks = self.blocks_for(prompt) - min(self.hit_blocks, self.blocks_for(prompt))
        return (self.blocks_used + new_blocks) / max(1, self.blocks_total)

    def blocks_for(self, prompt: Prompt) -> int:
        return -(-prompt.num_tokens // self.block_size)

    def fits(self, prompt: Prompt) -> bool:
        """Whether the prompt could ever stand in this pool, were it empty."""
        return self.blocks_for(prompt) <= self.blocks_total
