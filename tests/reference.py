"""The embedded model as `transformers` runs it: the oracle that nobody here wrote."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from libs.checkpoint.open import resolve_model


@cache
def embedded_reference() -> Any:
    """SmolLM2 in float32, in eval mode. Reading the file takes transformers 15 s: loaded once for all tests."""
    path = resolve_model("smollm2")
    return load_reference(path.parent, gguf_file=path.name)


def load_reference(folder: Path, **options: Any) -> Any:
    """Any model in a folder, in float32 and eval mode; never from the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32", **options)
