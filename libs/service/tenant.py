"""Whose cache a request may use. Only the credential says so: nothing in a body can name another's tenant."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

SHARED: Final = "default"  # those who show no credential, together
_SALT: Final = b"baton.tenant/1:"


def tenant_of(headers: Mapping[str, str]) -> str:
    """The tenant of the request's credential, or `SHARED`."""
    return tenant_of_key(credential_of(headers))


def credential_of(headers: Mapping[str, str]) -> str:
    """`Authorization: Bearer ...` or `x-api-key`; "" where there is none."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    credential = token.strip() if scheme.lower() == "bearer" else ""
    return credential or headers.get("x-api-key", "").strip()


def tenant_of_key(credential: str) -> str:
    """The tenant of a credential; `SHARED` for the empty one.

    It is part of every block's name, so another tenant's blocks are not found: not by a hit, and not by the time a
    hit would save. A digest, because names of tenants stand in messages and in the store's paths.
    """
    if not credential:
        return SHARED
    return "key-" + hashlib.sha256(_SALT + credential.encode("utf-8", "surrogateescape")).hexdigest()[:32]
