"""What the tests of damaged files share."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from libs.checkpoint.open import CheckpointError, open_checkpoint

SEED = int(os.environ.get("FUZZ_SEED", "20240"))
NUM_ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "240"))  # raise it, and change the seed, to look for more
MAX_PEAK_BYTES = 16 << 20  # far above a tiny file, far below what a believed size would take


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Fails if the block allocates much, even for a moment."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MAX_PEAK_BYTES
    finally:
        tracemalloc.stop()


def open_and_read(path: Path) -> str | None:
    """None for a checkpoint that opens and reads, else the message of its CheckpointError."""
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.tensor_names:
            checkpoint.tensor(name)
    except CheckpointError as error:
        assert error.reason and error.path.name in error.message
        return error.message
    return None
