"""Which runner serves a checkpoint."""

from __future__ import annotations

from libs.checkpoint.checkpoint import Checkpoint
from libs.engine.kv.pool import KvPool
from libs.engine.plan import Runner
from libs.service.config import Settings


def build_runner(checkpoint: Checkpoint, pool: KvPool, settings: Settings) -> Runner:
    """Loads the model. Only the chosen engine is imported: a fake one starts without torch."""
    if settings.engine == "fake":
        from libs.engine.fake import FakeModel, FakeRunner

        return FakeRunner(pool, FakeModel(vocab_size=checkpoint.config.vocab_size))
    from libs.engine.runner import TorchRunner

    return TorchRunner.load(checkpoint, pool, threads=settings.threads)
