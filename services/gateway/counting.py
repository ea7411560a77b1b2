"""Requests that need the tokenizer and no worker: counting, tokenising, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from aiohttp import web
from pydantic import ValidationError

from libs.text.model import TextModel
from services.gateway.answering import Served, body_of
from services.gateway.api import anthropic, tokens
from services.gateway.api.errors import from_validation, model_not_found
from services.gateway.api.messages import TokenCount
from services.gateway.api.tokens import Detokenized, Tokenized
from services.gateway.offload import Offload
from services.gateway.prepare import Preparer

T = TypeVar("T")


class Counting:
    """Raises ApiError for what cannot be counted."""

    def __init__(self, text: TextModel, preparer: Preparer, offload: Offload, served: Served) -> None:
        self._text = text
        self._preparer = preparer
        self._offload = offload
        self._served = served

    async def count(self, request: web.Request) -> bytes:
        """POST /v1/messages/count_tokens"""
        order = await self._read(request, anthropic.read_count)
        self._check_model(order.model)
        return msgspec.json.encode(TokenCount(input_tokens=len(await self._preparer.encode(order))))

    async def tokenize(self, request: web.Request) -> bytes:
        """POST /tokenize"""
        asked, order = await self._read(request, tokens.read_tokenize)
        self._check_model(asked.model)
        ids = await self._preparer.encode(order)
        names = tuple(map(self._text.token_text, ids)) if asked.return_token_strs else None
        return msgspec.json.encode(
            Tokenized(
                count=len(ids), max_model_len=self._served.context_length(), tokens=ids, token_strs=names
            )
        )

    async def detokenize(self, request: web.Request) -> bytes:
        """POST /detokenize"""
        asked = await self._read(request, tokens.read_detokenize)
        self._check_model(asked.model)
        tokens.check_ids(asked.tokens, self._text)
        return msgspec.json.encode(Detokenized(prompt=self._text.decode(asked.tokens, at_start=True)))

    async def _read(self, request: web.Request, read: Callable[[bytes], T]) -> T:
        body = await body_of(request)
        try:
            return await self._offload.run(lambda: read(body), weight=len(body) // 8)
        except ValidationError as error:
            raise from_validation(error) from None

    def _check_model(self, model: str | None) -> None:
        """One that is named must be there."""
        if model is not None and model != self._served.name:
            raise model_not_found(model)
