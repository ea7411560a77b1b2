"""Who a request comes from, whether it may come in, and how much is left for it.

Without a key file everybody may come in, and a credential is only a name for a tenant. Once one key was made, only keys
of the file open anything but what says whether the process lives. Limits hold for each gateway by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.service import keys
from libs.service.keys import ApiKey, KeyProblem, digest_of
from libs.service.logs import get_logger
from libs.service.tenant import credential_of, tenant_of_key
from services.gateway.api.errors import ApiError

OPEN_PATHS: Final = frozenset({"/health", "/ready"})
LOOK_S: Final = 1.0  # between two looks at the file
log = get_logger()


class Bucket:
    """So much a minute: full at first, refilled evenly, in debt after something that was larger than it looked."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._level = per_minute
        self._seen_s = clock()

    def wait_s(self) -> float:
        """Until something may be taken; 0: now."""
        now_s = self._clock()
        self._level = min(self._per_minute, self._level + (now_s - self._seen_s) * self._per_minute / 60)
        self._seen_s = now_s
        return max(0.0, (min(1.0, self._per_minute) - self._level) * 60 / self._per_minute)

    def take(self, amount: float) -> None:
        self._level -= amount


class Meter:
    """What one key has used."""

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self.key = key
        self._requests = _bucket(key.requests_per_minute, clock)
        self._tokens = _bucket(key.tokens_per_minute, clock)
        self._at_once = 0

    @contextmanager
    def use(self) -> Iterator[None]:
        """Around one request. Raises ApiError (429) when a limit is reached."""
        for bucket, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            if bucket is not None and (wait_s := bucket.wait_s()) > 0:
                raise _limited(f"the key's {what} for this minute are used up", wait_s)
        if self.key.at_once is not None and self._at_once >= self.key.at_once:
            raise _limited(f"the key has {self._at_once} requests at once, its limit", 1.0)
        if self._requests is not None:
            self._requests.take(1)
        self._at_once += 1
        try:
            yield
        finally:
            self._at_once -= 1

    def charge(self, num_tokens: int) -> None:
        """Tokens of prompt and answer, once they are known."""
        if self._tokens is not None:
            self._tokens.take(num_tokens)


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a request. `meter` is None where there are no keys."""

    tenant: str
    meter: Meter | None = None

    @property
    def key_id(self) -> str:
        return "" if self.meter is None else self.meter.key.id

    @contextmanager
    def use(self) -> Iterator[None]:
        """Around one request. Raises ApiError (429)."""
        if self.meter is None:
            yield
            return
        with self.meter.use():
            yield

    def charge(self, num_tokens: int) -> None:
        if self.meter is not None:
            self.meter.charge(num_tokens)


class Access:
    """Reads the key file when it changes. One that is damaged changes nothing: who had no access gets none."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises KeyProblem for a damaged file: a gateway must not start open because of it."""
        self._path = path
        self._clock = clock
        self._stamp = _stamp(path)
        self._looked_s = clock()
        self._meters: dict[str, Meter] = {}  # by digest
        self._take(keys.read(path))

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Raises ApiError (401) for somebody who may not come in."""
        self._look()
        credential = credential_of(headers)
        if not self._meters:
            return Caller(tenant_of_key(credential))
        meter = self._meters.get(digest_of(credential))
        problem = "unknown" if meter is None else meter.key.problem(time.time_ns())
        if meter is None or problem:
            raise _refused(credential, problem)
        return Caller(meter.key.tenant, meter)

    def _look(self) -> None:
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        if (
            stamp is None and self._meters
        ):  # gone by accident, or on purpose: only a new start opens the gateway
            log.error("the key file is gone; keys stay as they were", path=str(self._path))
            self._stamp = None
            return
        try:
            self._take(keys.read(self._path))
        except KeyProblem as error:
            log.error("keys stay as they were", error=str(error))
        self._stamp = stamp

    def _take(self, found: tuple[ApiKey, ...]) -> None:
        """What was used so far stays used, unless the key's limits are others."""
        old = self._meters
        self._meters = {
            key.digest: old[key.digest]
            if key.digest in old and old[key.digest].key == key
            else Meter(key, self._clock)
            for key in found
        }


def _bucket(per_minute: int | None, clock: Callable[[], float]) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, clock)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def _refused(credential: str, problem: str) -> ApiError:
    """The same words for a wrong key and a revoked one: whether there ever was such a key is nobody's business."""
    message = (
        "this server needs an API key: send Authorization: Bearer KEY, or x-api-key"
        if not credential
        else "the API key has expired"
        if problem == "expired"
        else "the API key is not valid"
    )
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key", challenge="Bearer")


def _limited(message: str, wait_s: float) -> ApiError:
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=wait_s)
