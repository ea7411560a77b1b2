"""The runner that serves: a model on the CPU with torch."""

from __future__ import annotations

import libs.kernels  # noqa: F401 - first: it sets what torch reads from the environment when imported

# isort: split
from collections.abc import Callable

import torch
from torch import Tensor

from libs.checkpoint.checkpoint import Checkpoint
from libs.engine.kv.pool import KvPool
from libs.engine.model.batch import build_batch
from libs.engine.model.llama import Llama
from libs.engine.model.passes import split_rows
from libs.engine.model.source import TensorSource
from libs.engine.model.weights import Progress, load_weights
from libs.engine.plan import StepPlan, never
from libs.engine.sampler import sample
from libs.kernels.determinism import numerics
from libs.kernels.kv import LayerKv
from libs.kernels.matmul import Matmul, choose_matmul
from libs.service.logs import get_logger
from libs.wire.messages import Token

log = get_logger()
_DTYPES = {"f16": torch.float16, "f32": torch.float32}


class TorchRunner:
    """Implements Runner. Use it from one thread at a time; the pool must stay open as long as it is used."""

    def __init__(
        self,
        source: TensorSource,
        pool: KvPool,
        *,
        matmul: Matmul | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        """Loads the weights. Without `matmul`, the BLAS is measured and used if its rows keep their bits.

        Raises ValueError where the pool's layout is not the model's.
        """
        config, layout = source.config, pool.layout
        expected = (config.num_layers, config.num_kv_heads, config.head_dim)
        if (layout.num_layers, layout.num_kv_heads, layout.head_dim) != expected:
            raise ValueError(f"a pool of {layout} cannot hold layers, kv heads, dim {expected}")
        weights = load_weights(source, on_progress)
        self.matmul = matmul or choose_matmul([(w.shape[1], w.shape[0]) for w in weights.matrices])
        self._layout = layout
        self._window = config.sliding_window
        self._model = Llama(config, weights, self.matmul, pool.num_blocks * layout.block_size)
        self._kv = layers_of(pool)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        pool: KvPool,
        *,
        threads: int | None = None,
        on_progress: Progress | None = None,
    ) -> TorchRunner:
        """As a worker starts it; `threads` None leaves torch's own number, all cores."""
        if threads is not None:
            torch.set_num_threads(threads)
        runner = cls(checkpoint, pool, on_progress=on_progress)
        log.info("model loaded", threads=torch.get_num_threads(), numerics=runner.numerics)
        return runner

    @property
    def numerics(self) -> str:
        """Names the arithmetic; workers where it differs may give different bits."""
        return numerics(self.matmul.name)

    def execute(self, plan: StepPlan, is_abandoned: Callable[[], bool] = never) -> tuple[Token | None, ...]:
        """See Runner. Raises ValueError where a row lacks blocks, LogitsError where KV or weights are damaged."""
        draws = [row.draw for row in plan.rows if row.draw is not None]
        tokens = iter(sample(self.logits(plan, is_abandoned).numpy(), draws))
        return tuple(None if row.draw is None else next(tokens) for row in plan.rows)

    @torch.inference_mode()
    def logits(self, plan: StepPlan, is_abandoned: Callable[[], bool] = never) -> Tensor:
        """Execute without drawing: raw logits of the rows that draw, in their order, [drawn, vocabulary]."""
        passes = [
            self._model.forward(build_batch(rows, self._layout, self._window), self._kv, is_abandoned)
            for rows in split_rows(plan.rows)
        ]
        if len(passes) == 1:
            return passes[0]
        return torch.cat([torch.empty(0, self._model.config.vocab_size), *passes])


def layers_of(pool: KvPool) -> list[LayerKv]:
    """Tensors over the pool's memory, one a layer."""
    layout = pool.layout
    blocks = torch.frombuffer(pool.map, dtype=_DTYPES[layout.dtype]).view(-1, *layout.block_shape)
    return [LayerKv.of(blocks[:, index], layout.head_dim) for index in range(layout.num_layers)]
