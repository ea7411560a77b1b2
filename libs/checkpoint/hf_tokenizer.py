"""What a Hugging Face folder says about text: tokenizer, chat template, ids that end a generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from libs.checkpoint.errors import CheckpointError, UnsupportedModel
from libs.checkpoint.hf_config import CONFIG_FILE
from libs.checkpoint.hf_json import HfGeneration, read_json
from libs.checkpoint.tokenizer_data import HfTokenizer

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"


class _NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str


class _Token(msgspec.Struct, frozen=True):
    content: str


class _TextConfig(msgspec.Struct, frozen=True):
    """The part of tokenizer_config.json that is needed here."""

    chat_template: str | list[_NamedTemplate] | None = None
    eos_token: str | _Token | None = None
    added_tokens_decoder: dict[int, _Token] = {}


def read_tokenizer(folder: Path) -> HfTokenizer:
    """tokenizer.json is only found here; `libs.text` reads it."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise UnsupportedModel(path, "is missing; other tokenizer formats are not supported")
    config_path = folder / TOKENIZER_CONFIG_FILE
    config: dict[str, Any] = read_json(config_path, dict) if config_path.exists() else {}
    return HfTokenizer(path, config)


def chat_template(folder: Path, tokenizer: HfTokenizer) -> str | None:
    """Jinja source: chat_template.jinja if there is one, else the default one of tokenizer_config.json."""
    path = folder / TEMPLATE_FILE
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(path, f"cannot be read: {error}") from error
    template = _text_config(folder, tokenizer).chat_template
    if isinstance(template, list):
        return next((entry.template for entry in template if entry.name == "default"), None)
    return template


def eos_token_ids(folder: Path, tokenizer: HfTokenizer) -> tuple[int, ...]:
    """generation_config.json's ids (config.json's where it has none), and the tokenizer's end token."""
    ids: list[int] = []
    for name in (GENERATION_FILE, CONFIG_FILE):
        if not ids and (folder / name).exists():
            found = read_json(folder / name, HfGeneration).eos_token_id
            ids = [found] if isinstance(found, int) else list(found or ())
    text = _text_config(folder, tokenizer)
    end = text.eos_token.content if isinstance(text.eos_token, _Token) else text.eos_token
    ids += [token for token, entry in text.added_tokens_decoder.items() if entry.content == end]
    return tuple(dict.fromkeys(ids))


def _text_config(folder: Path, tokenizer: HfTokenizer) -> _TextConfig:
    try:
        return msgspec.convert(tokenizer.config, _TextConfig, strict=False)
    except msgspec.ValidationError as error:
        raise CheckpointError(folder / TOKENIZER_CONFIG_FILE, f"damaged: {error}") from error
