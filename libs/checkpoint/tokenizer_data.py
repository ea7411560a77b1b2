"""What a checkpoint says about its tokenizer; `libs.text` turns it into one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """Vocabulary as GGUF metadata holds it (`tokenizer.ggml.*`). `scores` for "llama", `merges` for "gpt2"."""

    model: str  # gpt2 (byte-level BPE) or llama (SentencePiece BPE)
    pre: str  # name of the pre-tokenizer, for gpt2
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]  # 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte
    scores: tuple[float, ...]
    merges: tuple[str, ...]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    add_bos: bool
    add_space_prefix: bool


@dataclass(frozen=True, slots=True)
class HfTokenizer:
    """A Hugging Face folder's tokenizer.json, with the content of tokenizer_config.json."""

    tokenizer_json: Path
    config: dict[str, Any]
