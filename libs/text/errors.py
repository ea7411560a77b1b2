"""Errors of this package.

TextError               a text or a conversation that this model cannot take; the client's to correct
UnsupportedTokenizer    a tokenizer that Baton does not build; names what is unknown
"""

from __future__ import annotations

from libs.wire.errors import BatonError, Code


class TextError(BatonError):
    """The message says what is wrong and can be shown to the client."""

    code = Code.BAD_REQUEST


class UnsupportedTokenizer(BatonError):
    """Raised while a model is opened, before anything is served."""
