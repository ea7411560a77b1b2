"""Which engine serves: the native kernels where they can be had, else torch; or scripted tokens.

Only the chosen engine is imported: with native kernels, no torch is in the process.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Literal

from libs.checkpoint.checkpoint import Checkpoint
from libs.engine.kv.pool import KvPool
from libs.engine.plan import Runner
from libs.kernels.native.library import NativeUnavailable, load
from libs.service.config import Settings
from libs.service.logs import get_logger

log = get_logger()


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """`numerics` names the arithmetic: engines of different numerics never exchange KV."""

    kind: Literal["native", "torch", "fake"]
    numerics: str
    library: ctypes.CDLL | None = None


class EngineUnavailable(ValueError):
    """The settings ask for an engine that this machine cannot have."""


def choose_engine(settings: Settings) -> EngineChoice:
    """May compile the kernels, which takes up to a minute. Raises EngineUnavailable."""
    if settings.engine in ("torch", "fake"):
        return EngineChoice(settings.engine, settings.engine)
    from libs.engine.native_runner import NUMERICS

    try:
        library = load(settings.cache_dir, settings.kernels)
    except NativeUnavailable as error:
        if settings.engine == "native" or settings.kernels != "auto":
            raise EngineUnavailable(
                f"engine={settings.engine}, kernels={settings.kernels}: {error}"
            ) from error
        log.warning(
            "no native kernels: serving through torch, which is several times slower", reason=str(error)
        )
        return EngineChoice("torch", "torch")
    numerics = NUMERICS if settings.weights == "native" else f"{NUMERICS}-{settings.weights}"
    return EngineChoice("native", numerics, library)


def build_runner(
    checkpoint: Checkpoint, pool: KvPool, settings: Settings, choice: EngineChoice | None = None
) -> Runner:
    """Loads the model into the engine that was chosen; without `choice`, chooses."""
    choice = choice or choose_engine(settings)
    if choice.kind == "fake":
        from libs.engine.fake import FakeModel, FakeRunner

        return FakeRunner(pool, FakeModel(vocab_size=checkpoint.config.vocab_size))
    if choice.library is None:
        from libs.engine.runner import TorchRunner

        return TorchRunner.load(checkpoint, pool, threads=settings.threads)
    return _native_runner(checkpoint, pool, settings, choice.library)


def _native_runner(checkpoint: Checkpoint, pool: KvPool, settings: Settings, library: ctypes.CDLL) -> Runner:
    from libs.engine.model.packed import open_packed
    from libs.engine.native_runner import NativeRunner
    from libs.kernels.native.kernels import Kernels

    packed = open_packed(checkpoint, settings.cache_dir, int8=settings.weights == "int8")
    kernels = Kernels(library, settings.threads or len(os.sched_getaffinity(0)))
    runner = NativeRunner(packed, pool, kernels)
    log.info(
        "model loaded",
        threads=kernels.threads,
        numerics=runner.numerics,
        kernels=kernels.instruction_set,
        weights_mib=round(packed.num_bytes / 2**20),
    )
    return runner
