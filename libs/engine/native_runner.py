"""The runner that serves where a C++ compiler made the native kernels: quantised weights, no torch in the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from libs.engine.kv.pool import KvPool
from libs.engine.model.native import NativeLlama
from libs.engine.model.native_batch import build_native_batch
from libs.engine.model.packed import PackedModel
from libs.engine.model.passes import split_rows
from libs.engine.plan import Row, StepPlan, never
from libs.engine.sampler import sample
from libs.kernels.native.interface import Floats
from libs.kernels.native.kernels import Kernels
from libs.wire.messages import Token

NUMERICS = "native-1"  # changes whenever a kernel may give other bits than before


class NativeRunner:
    """Implements Runner. Use it from one thread at a time; the pool must stay open as long as it is used."""

    def __init__(self, packed: PackedModel, pool: KvPool, kernels: Kernels) -> None:
        """Raises ValueError where the pool's layout is not the model's."""
        config, layout = packed.config, pool.layout
        expected = (config.num_layers, config.num_kv_heads, config.head_dim)
        if (layout.num_layers, layout.num_kv_heads, layout.head_dim) != expected:
            raise ValueError(f"a pool of {layout} cannot hold layers, kv heads, dim {expected}")
        self._layout = layout
        self._window = config.sliding_window
        self._model = NativeLlama(packed, pool, kernels)

    @property
    def numerics(self) -> str:
        """Names the arithmetic. It is the same on every machine that has native kernels."""
        return NUMERICS

    def execute(self, plan: StepPlan, is_abandoned: Callable[[], bool] = never) -> tuple[Token | None, ...]:
        """See Runner. Raises ValueError where a row lacks blocks, LogitsError where KV or weights are damaged."""
        tokens: list[Token] = []
        for rows in split_rows(plan.rows):
            draws = [row.draw for row in rows if row.draw is not None]
            tokens += sample(self._forward(rows, is_abandoned), draws)
        drawn = iter(tokens)
        return tuple(None if row.draw is None else next(drawn) for row in plan.rows)

    def logits(self, plan: StepPlan, is_abandoned: Callable[[], bool] = never) -> Floats:
        """Execute without drawing: raw logits of the rows that draw, in their order, [drawn, vocabulary]."""
        passes = [self._forward(rows, is_abandoned).copy() for rows in split_rows(plan.rows)]
        return np.concatenate([np.empty((0, self._model.config.vocab_size), np.float32), *passes])

    def _forward(self, rows: Sequence[Row], is_abandoned: Callable[[], bool]) -> Floats:
        return self._model.forward(build_native_batch(rows, self._layout, self._window), is_abandoned)
