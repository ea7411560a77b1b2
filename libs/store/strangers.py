"""The same tokens under another model, layout or tenant: why a prompt that was sent before is not found.

For the operator's eyes only. A client that were told would learn what others have asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from libs.store.header import pack_tokens
from libs.store.interface import Store, StoreError
from libs.store.key import ObjectKey
from libs.store.objects import read_header

MAX_HEADERS: Final = 10_000  # a look, not a search through everything


def find_strangers(store: Store, tokens: Sequence[int], own_namespace: str, own_tenant: str) -> list[str]:
    """Where else the store holds the beginning of `tokens`: "another tenant", "another model or layout".

    The folders of the asker, `own_namespace` and `own_tenant`, are left out. Every object that begins a chain is looked
    at, `MAX_HEADERS` at most. Raises StoreError when the store cannot be listed.
    """
    keys = [ObjectKey.parse(each.key) for page in store.list() for each in page]
    known = {key for each in keys for key in each.blocks}
    heads = [each for each in keys if each.parent not in known]
    strangers = [each for each in heads if (each.namespace, each.tenant) != (own_namespace, own_tenant)]
    found = {
        "another tenant" if each.namespace == own_namespace else "another model or layout"
        for each in strangers[:MAX_HEADERS]
        if _begins(store, each, tokens)
    }
    return sorted(found)


def _begins(store: Store, key: ObjectKey, tokens: Sequence[int]) -> bool:
    try:
        header = read_header(store, key.path())
    except StoreError:  # gone or damaged: says nothing
        return False
    return header.entries[0].tokens == pack_tokens(tuple(tokens[: header.block_size]))
