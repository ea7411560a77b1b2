"""What a worker serves: the model's identity and limits, and the layout of its KV."""

from __future__ import annotations

from dataclasses import dataclass

from libs.checkpoint.open import Checkpoint
from libs.engine.fake import FAKE_LAYOUT
from libs.engine.kv.layout import KvLayout
from libs.service.config import Settings
from libs.wire.errors import Code, RequestRefused


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Identity and limits of the served model. Lengths in tokens."""

    name: str
    fingerprint: str
    context_length: int
    vocab_size: int
    layout: KvLayout

    def check_prompt(self, prompt: tuple[int, ...]) -> None:
        """Raises RequestRefused for a prompt that this model cannot take. The gateway checked; nobody trusts it."""
        if not prompt:
            raise RequestRefused(Code.BAD_REQUEST, "the prompt has no tokens", retryable=False)
        if len(prompt) >= self.context_length:
            text = f"prompt of {len(prompt)} tokens; the context holds {self.context_length}"
            raise RequestRefused(Code.CONTEXT_LENGTH_EXCEEDED, text, retryable=False)
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            text = f"token ids must be 0 to {self.vocab_size - 1}"
            raise RequestRefused(Code.BAD_REQUEST, text, retryable=False)


def card_of(checkpoint: Checkpoint, settings: Settings, numerics: str) -> ModelCard:
    """The card of a checkpoint as these settings serve it. `numerics`: see EngineChoice."""
    config = checkpoint.config
    if settings.engine == "fake":
        layout = FAKE_LAYOUT
    else:
        layout = KvLayout(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=settings.kv_block_size,
            dtype=settings.kv_dtype,
            numerics=numerics,
        )
    return ModelCard(
        name=settings.served_name or config.name,
        fingerprint=checkpoint.fingerprint(settings.cache_dir / "fingerprints"),
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        layout=layout,
    )
