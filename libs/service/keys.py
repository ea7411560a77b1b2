"""API keys on disk: who may use the gateway, as which tenant, how much. Secrets are kept as digests only.

A secret has 256 random bits, so a plain SHA-256 is enough: there is nothing to guess, and looking a digest up in a
table tells by its time nothing about the secret. The file is replaced as a whole, so a reader never sees half of it.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from libs.service.file_lock import file_lock
from libs.service.tenant import tenant_of_key

PREFIX: Final = "bk-"
_SECRET_BYTES: Final = 32
_LOCK_S: Final = 10.0
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}\Z")


class KeyProblem(Exception):
    """The key file is damaged, or cannot be written, or a name is wrong; the message is for people."""


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key. Times are ns since 1970; limits of None do not limit. A revoked one stays in the list."""

    id: str  # for logs; says nothing about the secret
    name: str
    digest: str  # SHA-256 of the secret, in hex
    tenant: str
    created_ns: int
    expires_ns: int | None = None
    revoked_ns: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    at_once: int | None = None

    def problem(self, now_ns: int) -> str:
        """Why it must not be used; "" if it may."""
        if self.revoked_ns is not None:
            return "revoked"
        if self.expires_ns is not None and self.expires_ns <= now_ns:
            return "expired"
        return ""


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int = 1
    keys: tuple[ApiKey, ...] = ()


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def read(path: Path) -> tuple[ApiKey, ...]:
    """All keys; none where there is no file. Raises KeyProblem for a file that is damaged or cannot be read."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.DecodeError) as error:
        raise KeyProblem(f"the keys in {path} cannot be read: {error}") from error
    if found.version != 1:
        raise KeyProblem(f"the keys in {path} have format {found.version}; this Baton knows format 1")
    return found.keys


def add(
    path: Path,
    name: str,
    *,
    tenant: str | None = None,
    expires_ns: int | None = None,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    at_once: int | None = None,
) -> tuple[ApiKey, str]:
    """Makes a key, and returns it with its secret, which is kept nowhere. Without `tenant` it is a tenant of its own.

    Raises KeyProblem for a name that is wrong, or taken by a key that still works.
    """
    for what, value in (("name", name), ("tenant", tenant)):
        if value is not None and not _NAME.match(value):
            raise KeyProblem(
                f"{what} {value!r}: must be 1 to 64 of A-Z a-z 0-9 _ . @ - and begin with a letter or digit"
            )
    secret = PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    key = ApiKey(
        id=secrets.token_hex(6),
        name=name,
        digest=digest_of(secret),
        tenant=tenant_of_key(secret) if tenant is None else f"tenant-{tenant}",
        created_ns=time.time_ns(),
        expires_ns=expires_ns,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        at_once=at_once,
    )

    def change(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
        if any(one.name == name and not one.problem(key.created_ns) for one in keys):
            raise KeyProblem(f"there is a key named {name!r} already; revoke it, or choose another name")
        return (*keys, key)

    _change(path, change)
    return key, secret


def revoke(path: Path, name_or_id: str) -> ApiKey:
    """From now on it is refused. Raises KeyProblem where there is no such key that still works."""
    now_ns, revoked = time.time_ns(), list[ApiKey]()

    def change(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
        changed = tuple(
            msgspec.structs.replace(one, revoked_ns=now_ns)
            if name_or_id in (one.name, one.id) and one.revoked_ns is None
            else one
            for one in keys
        )
        revoked.extend(new for new, old in zip(changed, keys, strict=True) if new is not old)
        if not revoked:
            raise KeyProblem(f"there is no key {name_or_id!r} that still works; `baton keys list` shows all")
        return changed

    _change(path, change)
    return revoked[0]


def _change(path: Path, change: Callable[[tuple[ApiKey, ...]], tuple[ApiKey, ...]]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(path.with_suffix(".lock"), _LOCK_S, lambda waited_s: None):
            data = msgspec.json.format(msgspec.json.encode(_File(keys=change(read(path)))), indent=1)
            fresh = path.with_suffix(".new")
            fresh.unlink(missing_ok=True)
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data + b"\n")
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
    except OSError as error:
        raise KeyProblem(f"the keys in {path} cannot be changed: {error}") from error
