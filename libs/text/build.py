"""From what a checkpoint says about its tokenizer to a vocabulary."""

from __future__ import annotations

from collections.abc import Iterable

from libs.checkpoint.tokenizer_data import GgufTokenizer, HfTokenizer
from libs.text.gguf import gguf_vocabulary
from libs.text.hf import hf_vocabulary
from libs.text.vocabulary import Vocabulary


def build_vocabulary(data: GgufTokenizer | HfTokenizer, eos_token_ids: Iterable[int] = ()) -> Vocabulary:
    """`eos_token_ids` are control tokens even where the file does not mark them so.

    Raises UnsupportedTokenizer for a kind of tokenizer that Baton does not know.
    """
    if isinstance(data, GgufTokenizer):
        return gguf_vocabulary(data, eos_token_ids)
    return hf_vocabulary(data, eos_token_ids)
