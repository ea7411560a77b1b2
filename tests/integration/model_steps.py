"""Drive a runner by hand: sequences with block tables of their own in a pool that starts full of NaN."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libs.checkpoint.config import ModelConfig
from libs.checkpoint.parameters import parameters
from libs.engine.kv.layout import KvDtype, KvLayout
from libs.engine.kv.pool import KvPool
from libs.engine.model.packed import pack_source
from libs.engine.model.source import TensorSource
from libs.engine.native_runner import NativeRunner
from libs.engine.plan import Draw, Row, StepPlan
from libs.engine.runner import TorchRunner
from libs.kernels.kv import LayerKv
from libs.kernels.matmul import Matmul
from libs.kernels.native.formats import Format
from libs.kernels.native.kernels import Kernels
from libs.wire.messages import Sampling
from tests.checkpoints import TinyModel
from tests.native import library

GREEDY = Sampling(temperature=0.0)
AnyRunner = TorchRunner | NativeRunner
MakeRunner = Callable[[TensorSource, KvPool], AnyRunner]

# Every format at once: matrices of one layer quantised, of the next stored as floats, and each reads what both need.
MIXED_FORMATS = {
    "embed.weight": Format.Q8_F16,
    "layers.0.q.weight": Format.Q4_F16,
    "layers.0.k.weight": Format.F16,
    "layers.0.v.weight": Format.Q8X2_F32,
    "layers.0.o.weight": Format.Q4_F32,
    "layers.0.gate.weight": Format.Q8_F32_MIN,
    "layers.0.up.weight": Format.Q8_F32,
    "layers.0.down.weight": Format.Q8_F16,
    "layers.1.q.weight": Format.BF16,
    "layers.1.o.weight": Format.Q4_F16,
    "layers.1.gate.weight": Format.F16,
    "layers.1.up.weight": Format.Q4_F16,
    "layers.1.down.weight": Format.Q4_F32,
}


def torch_runner(source: TensorSource, pool: KvPool, matmul: Matmul | None = None) -> TorchRunner:
    return TorchRunner(source, pool, matmul=matmul)


def native_runner(
    source: TensorSource,
    pool: KvPool,
    *,
    formats: Mapping[str, Format] | None = None,
    instruction_set: str = "auto",
    threads: int = 1,
) -> NativeRunner:
    """`formats` for the matrices that `source` has; float32 for the others."""
    kernels = Kernels(library(instruction_set), threads)
    chosen = {
        name: format for name, format in (formats or {}).items() if name in parameter_names(source.config)
    }
    return NativeRunner(pack_source(source, chosen), pool, kernels)


def parameter_names(config: ModelConfig) -> set[str]:
    return {parameter.name for parameter in parameters(config)}


@dataclass(frozen=True)
class Source:
    """A tiny model as a place to load weights from."""

    model: TinyModel

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self.model.weights[name]


@dataclass
class Feed:
    """A sequence on its way through the model: `done` of `tokens` have their KV in `blocks`."""

    tokens: list[int]
    blocks: list[int]
    done: int = 0

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done


class Bench:
    """A runner, its pool and the free blocks of it. What was never written is NaN: whoever reads it shows it."""

    def __init__(
        self,
        source: TensorSource,
        num_blocks: int,
        *,
        block_size: int = 16,
        dtype: KvDtype = "f16",
        make_runner: MakeRunner = torch_runner,
        seed: int = 0,
    ) -> None:
        config = source.config
        self.layout = KvLayout(config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype)
        self.pool = KvPool(self.layout, num_blocks)
        self.runner = make_runner(source, self.pool)
        self.vocab_size = config.vocab_size
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._spoil(self._free)

    def close(self) -> None:
        self.pool.close()

    def feed(self, tokens: Iterable[int], shared: Sequence[int] = ()) -> Feed:
        """A new sequence; the blocks of `shared` hold the KV of its first tokens already."""
        tokens = list(tokens)
        own = self.layout.blocks_for(len(tokens)) - len(shared)
        blocks = [*shared, *(self._free.pop() for _ in range(own))]
        return Feed(tokens, blocks, len(shared) * self.layout.block_size)

    def release(self, feed: Feed, shared: int = 0) -> None:
        """Free all but the first `shared` blocks; they are spoilt, so that no one relies on them."""
        self._spoil(feed.blocks[shared:])
        self._free[:0] = feed.blocks[shared:]

    def step(self, *parts: tuple[Feed, int]) -> list[Tensor | None]:
        """Compute the next so many tokens of each sequence; logits of those that are complete."""
        rows = tuple(_row(feed, count, str(i)) for i, (feed, count) in enumerate(parts))
        logits = iter(torch.as_tensor(self.runner.logits(StepPlan(rows))))
        for feed, count in parts:
            feed.done += count
        return [None if row.draw is None else next(logits) for row in rows]

    def run(self, feed: Feed, chunks: Iterable[int]) -> Tensor:
        """Compute a sequence alone, in chunks of these sizes (the last is cut short); its last logits."""
        for count in chunks:
            (logits,) = self.step((feed, min(count, feed.left)))
            if logits is not None:
                return logits
        raise AssertionError("the chunks end before the sequence does")

    def kv(self, feed: Feed) -> bytes:
        """The KV of a sequence's tokens, all of its blocks without what is behind its end."""
        used = len(feed.tokens) - (len(feed.blocks) - 1) * self.layout.block_size
        kv = self._all()[feed.blocks]
        for layer in range(self.layout.num_layers):
            last = LayerKv.of(kv[-1:, layer], self.layout.head_dim)
            last.keys[..., used:] = 0
            last.values[..., used:, :] = 0
        return kv.numpy().tobytes()

    def _all(self) -> Tensor:
        dtype = torch.float16 if self.layout.dtype == "f16" else torch.float32
        return torch.frombuffer(self.pool.map, dtype=dtype).view(-1, *self.layout.block_shape)

    def _spoil(self, blocks: list[int]) -> None:
        self._all()[blocks] = torch.nan


def _row(feed: Feed, count: int, request_id: str) -> Row:
    end = feed.done + count
    draw = Draw(GREEDY, feed.tokens, len(feed.tokens)) if end == len(feed.tokens) else None
    return Row(request_id, tuple(feed.tokens[feed.done : end]), feed.done, tuple(feed.blocks), draw)


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Equal to the last bit; NaN is never right."""
    return bool(expected.isfinite().all()) and torch.equal(
        actual.view(torch.int32), expected.view(torch.int32)
    )


def random_tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]
