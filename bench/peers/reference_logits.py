"""Writes a base of log-probabilities by float32 `transformers`; `quality` runs this in a process of its own.

python -m bench.peers.reference_logits MODEL THREADS TOKENS.json BASE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.kl_base import Floats, write_base
from bench.peers.transformers_peer import load_reference


def logits_of(model: Any, texts: Sequence[Sequence[int]]) -> Iterator[Floats]:
    """Per text, the logits after its positions n // 2 .. n - 2: [positions, vocabulary]."""
    import torch

    for tokens in texts:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0]
        yield logits[len(tokens) // 2 : -1].numpy().astype(np.float32)


def main() -> None:
    model, threads, tokens, base = sys.argv[1:]
    texts = json.loads(Path(tokens).read_text(encoding="utf-8"))
    write_base(Path(base), texts, logits_of(load_reference(Path(model), int(threads)), texts))


if __name__ == "__main__":
    main()
