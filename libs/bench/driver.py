"""Times steps of a runner: plans made by hand, as a scheduler would make them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from libs.bench.shapes import Cached, Decode, Prefill
from libs.engine.kv.layout import KvLayout
from libs.engine.kv.pool import KvPool
from libs.engine.plan import Draw, Row, Runner, StepPlan
from libs.wire.messages import Sampling

_GREEDY = Sampling(temperature=0.0)
_WARM_UP_TOKENS = 32


def blocks_needed(layout: KvLayout, longest: int, num_streams: int, stream_tokens: int) -> int:
    """Blocks of a pool for one sequence of `longest` tokens and the other streams, none shared."""
    return layout.blocks_for(longest) + (num_streams - 1) * layout.blocks_for(stream_tokens)


class Driver:
    """Sequences of random tokens with blocks of their own. All times are seconds of `clock`.

    Stream 0 has room for `longest` tokens, the others for `stream_tokens`. What lies in the blocks is always
    the KV of some text: speed must not depend on what was measured before.
    """

    def __init__(
        self,
        runner: Runner,
        pool: KvPool,
        *,
        vocab_size: int,
        max_step_tokens: int,
        longest: int,
        num_streams: int = 1,
        stream_tokens: int = 1,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises ValueError for a pool without room for these sequences."""
        needed = blocks_needed(pool.layout, longest, num_streams, stream_tokens)
        if needed > pool.num_blocks:
            raise ValueError(f"{needed} blocks are needed, the pool has {pool.num_blocks}")
        self._runner = runner
        self._pool = pool
        self._vocab_size = vocab_size
        self._chunk = max_step_tokens
        self._random = random.Random(seed)
        self._clock = clock
        first = pool.layout.blocks_for(longest)
        size = pool.layout.blocks_for(stream_tokens)
        others = (first + i * size for i in range(num_streams - 1))
        self._tables = [tuple(range(first)), *(tuple(range(start, start + size)) for start in others)]
        self._filled = [0] * num_streams  # tokens whose KV lies in the blocks of each stream

    def warm_up(self) -> None:
        """A short prompt and a step after it, so that no figure holds what is done only once."""
        self.prefill(Prefill(min(_WARM_UP_TOKENS, self._capacity(0) - 1)))
        self._execute([(0, self._filled[0], self._tokens(1))])

    def prefill(self, shape: Prefill) -> float:
        """Time of a prompt, in chunks of `max_step_tokens`, until its first token is drawn."""
        tokens = self._tokens(shape.num_tokens)
        begin = self._clock()
        for start in range(0, shape.num_tokens, self._chunk):
            chunk = tokens[start : start + self._chunk]
            self._execute([(0, start, chunk)], draw=start + len(chunk) == shape.num_tokens)
        elapsed = self._clock() - begin
        self._filled[0] = max(self._filled[0], shape.num_tokens)
        return elapsed

    def decode(self, shape: Decode, steps: int) -> float:
        """Time of `steps` steps in which each stream gets one token; the first has position `context`."""
        streams = range(shape.num_streams)
        for stream in streams:
            self._fill(stream, shape.context)
        inputs = [self._tokens(steps) for _ in streams]
        begin = self._clock()
        for step in range(steps):
            position = shape.context + step
            self._execute([(stream, position, inputs[stream][step : step + 1]) for stream in streams])
        elapsed = self._clock() - begin
        for stream in streams:
            self._filled[stream] = max(self._filled[stream], shape.context + steps)
        return elapsed

    def cached(self, shape: Cached) -> float:
        """Time until the first token of a prompt that lies in the pool but for its end."""
        self._fill(0, shape.cached)
        tokens = self._tokens(shape.new)
        begin = self._clock()
        self._execute([(0, shape.cached, tokens)])
        return self._clock() - begin

    def _fill(self, stream: int, num_tokens: int) -> None:
        """Puts the KV of at least `num_tokens` tokens into a stream's blocks; computed once, then copied."""
        if self._filled[stream] >= num_tokens:
            return
        if stream == 0:
            self.prefill(Prefill(num_tokens))
            return
        self._fill(0, num_tokens)
        count = self._pool.layout.blocks_for(num_tokens)
        for source, target in zip(self._tables[0][:count], self._tables[stream][:count], strict=True):
            self._pool.blocks(target, 1)[:] = self._pool.blocks(source, 1)
        self._filled[stream] = num_tokens

    def _execute(self, parts: list[tuple[int, int, tuple[int, ...]]], *, draw: bool = True) -> None:
        """One step: (stream, start, tokens) of each row."""
        rows = []
        for stream, start, tokens in parts:
            end = start + len(tokens)
            table = self._tables[stream][: self._pool.layout.blocks_for(end)]
            drawing = Draw(_GREEDY, [0] * end, end) if draw else None
            rows.append(Row(f"bench-{stream}", tokens, start, table, drawing))
        self._runner.execute(StepPlan(tuple(rows)))

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(self._vocab_size) for _ in range(count))

    def _capacity(self, stream: int) -> int:
        return len(self._tables[stream]) * self._pool.layout.block_size
