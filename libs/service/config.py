"""Configuration: read once in a `__main__`, frozen, handed on.

Each field is set by `BATON_<FIELD>` in the environment, e.g. `BATON_KV_BLOCK_SIZE=32`, or by the flag of the
same name of a `baton` command; flags win. `None` means "decide from the machine", which `resolve` does.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, get_args, get_type_hints

from libs.transfer.names import parse as parse_transfers
from libs.wire.subjects import check_id

_TYPE_NAMES: Final = {int: "a whole number", float: "a finite number", str: "text", Path: "a path"}
_POSITIVE: Final = (
    "threads",
    "kv_block_size",
    "kv_cache_mib",
    "max_batch",
    "max_step_tokens",
    "max_queue",
    "lease_s",
    "pull_timeout_s",
    "heartbeat_s",
    "max_inflight",
    "request_timeout_s",
    "recovery_s",
    "default_max_tokens",
    "max_body_bytes",
    "store_mib",
    "store_ttl_s",
    "store_tenant_share",
    "store_rescan_s",
)


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it and what it takes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of all services; each reads its own."""

    # where
    nats_url: str = "nats://127.0.0.1:4222"
    state_dir: Path = Path("~/.local/state/baton")
    cache_dir: Path = Path(
        "~/.cache/baton"
    )  # compiled kernels, packed weights: made again when they are gone
    instance_id: str = ""  # "": made from role, host and process id
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    otlp_endpoint: str | None = None  # also OTEL_EXPORTER_OTLP_ENDPOINT

    # model and engine
    model: str = "smollm2"  # path of a GGUF file or Hugging Face folder, or an embedded name
    served_name: str | None = None  # None: the checkpoint's own name
    engine: Literal["auto", "native", "torch", "fake"] = "auto"  # auto: native where it compiles, else torch
    kernels: Literal["auto", "avx512vnni", "avx2", "portable"] = (
        "auto"  # instruction set of the native engine
    )
    weights: Literal["native", "int8"] = "native"  # int8: floats become 8-bit, a scale for each 32
    threads: int | None = None  # None: all cores, halved where prefill and decode share them
    kv_block_size: int = 16  # tokens
    kv_dtype: Literal["f16", "f32"] = "f16"
    kv_cache_mib: int | None = None  # per worker; None: 1/8 of memory, 64 to 2048 MiB
    max_batch: int = 32  # sequences in one step
    max_step_tokens: int = 256  # tokens in one step, so also the longest chunk of a prompt
    max_queue: int = 256  # sequences that wait in one worker; more are refused
    lease_s: float = 30.0
    pull_timeout_s: float = 5.0
    transfers: str = "shm,tcp"  # how KV blocks may move, the best first; what is left out is forbidden
    transfer_host: str = ""  # address for TCP transfers, which peers are told; "": the one that reaches NATS
    transfer_port: int = 0  # 0: any free one
    heartbeat_s: float = 0.5
    drain_timeout_s: float = 30.0

    # the durable KV store
    store: str = "auto"  # file:///path, s3://bucket/prefix, none; auto: a folder under the state dir
    store_mib: int | None = None  # None: a tenth of the file system, up to 64 GiB; S3: 64 GiB
    store_ttl_s: float | None = None  # unused for so long: deleted; None: only for want of room
    store_tenant_share: float = 1.0  # of the store, what one tenant may fill
    store_policy: Literal["lru", "s3fifo", "cost"] = "lru"  # what is deleted first
    store_rescan_s: float = 60.0  # between listings, which tell what others have written and deleted

    # placement
    local_prefill_tokens: int = 64  # decode computes an uncached suffix up to this itself, if most was cached

    # gateway
    host: str = "127.0.0.1"
    port: int = 8000
    listen_fd: int | None = None  # a listening socket that was inherited, in place of host and port
    tls_cert: Path | None = None  # PEM, with the chain; None: plain HTTP
    tls_key: Path | None = None
    max_inflight: int = 256  # requests a gateway owns at once; more are refused with 429
    request_timeout_s: float = 600.0
    recovery_s: float = 20.0  # a request that lost its worker waits so long for another
    default_max_tokens: int | None = None  # None: to the end of the context
    max_body_bytes: int = 8 * 1024 * 1024

    @property
    def run_dir(self) -> Path:
        """Sockets and process ids; emptied by a restart of the machine without loss."""
        return self.state_dir / "run"

    @property
    def store_url(self) -> str | None:
        """Where blocks are kept; None: nowhere."""
        if self.store == "none":
            return None
        return f"file://{self.state_dir / 'store'}" if self.store == "auto" else self.store

    @property
    def keys_file(self) -> Path:
        """API keys, without their secrets; nobody needs one where there is no such file."""
        return self.state_dir / "keys.json"

    @property
    def trace_dir(self) -> Path:
        return self.state_dir / "traces"

    @property
    def log_dir(self) -> Path:
        return self.state_dir / "logs"


def load(environ: Mapping[str, str], **flags: object) -> Settings:
    """Settings from `BATON_*` variables and flags (None: not given). Raises ConfigError, naming the setting."""
    hints = get_type_hints(Settings)
    known = {f"BATON_{field.name.upper()}": field.name for field in fields(Settings)}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if variable.startswith("BATON_"):
            if variable not in known:
                raise ConfigError(
                    f"{variable} is not a setting; did you mean one of {_near(variable, known)}?"
                )
            values[known[variable]] = _parse(variable, text, hints[known[variable]])
    if "otlp_endpoint" not in values and environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        values["otlp_endpoint"] = environ["OTEL_EXPORTER_OTLP_ENDPOINT"]
    for name, value in flags.items():
        if value is not None:
            values[name] = _parse(f"--{name.replace('_', '-')}", str(value), hints[name])
    settings = replace(Settings(), **values)
    settings = replace(
        settings,
        state_dir=_absolute("state_dir", settings.state_dir),
        cache_dir=_absolute("cache_dir", settings.cache_dir),
        tls_cert=None if settings.tls_cert is None else _absolute("tls_cert", settings.tls_cert),
        tls_key=None if settings.tls_key is None else _absolute("tls_key", settings.tls_key),
    )
    _check(settings)
    return settings


def instance_id(settings: Settings, service: str) -> str:
    """The configured id, or one that no other process on this network has: the same each time it is asked."""
    if settings.instance_id:
        return check_id(settings.instance_id)
    # The end of a long name is what differs between the machines or pods of one cluster.
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[-40:]
    return check_id(f"{service}-{host}-{os.getpid()}")


def _parse(source: str, text: str, hint: Any) -> Any:
    """`text` as the type that `hint` names: a class, `class | None` or a Literal of texts."""
    choices = get_args(hint)
    if choices and isinstance(hint, UnionType):
        if text == "":
            return None
        hint = next(choice for choice in choices if choice is not type(None))
        choices = ()
    if choices:  # Literal
        if text not in choices:
            raise ConfigError(f"{source}={text!r}: must be one of {', '.join(choices)}")
        return text
    try:
        value = hint(text)
    except ValueError:
        value = math.nan
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{source}={text!r}: must be {_TYPE_NAMES[hint]}")
    return value


def _absolute(name: str, path: Path) -> Path:
    if str(path) in ("", "."):  # Path("") is the current directory, which nobody means by an empty setting
        raise ConfigError(f"{name}={str(path)!r}: must be the path of a directory, or file, of its own")
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"{name}={str(path)!r}: {error}") from None


def _check(settings: Settings) -> None:
    for name in _POSITIVE:
        value = getattr(settings, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{name}={value}: must be above 0")
    for name in ("local_prefill_tokens", "drain_timeout_s", "listen_fd"):
        if (getattr(settings, name) or 0) < 0:
            raise ConfigError(f"{name}={getattr(settings, name)}: must be 0 or more")
    if settings.store_tenant_share > 1:
        raise ConfigError(f"store_tenant_share={settings.store_tenant_share}: must be at most 1")
    for name in ("nats_url", "model", "host", "store"):
        if not getattr(settings, name).strip():
            raise ConfigError(f"{name}: must not be empty")
    for name in ("port", "transfer_port"):
        if not 0 <= getattr(settings, name) <= 65535:
            raise ConfigError(f"{name}={getattr(settings, name)}: must be 0 to 65535")
    try:
        parse_transfers(settings.transfers)
    except ValueError as error:
        raise ConfigError(f"transfers={settings.transfers!r}: {error}") from None
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise ConfigError("tls_cert and tls_key: give both, or none")
    endpoint = settings.otlp_endpoint
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"otlp_endpoint={endpoint!r}: must begin with http:// or https://")
    if settings.instance_id:
        try:
            check_id(settings.instance_id)
        except ValueError as error:
            raise ConfigError(f"instance_id: {error}") from None


def _near(variable: str, known: Mapping[str, str]) -> str:
    return ", ".join(difflib.get_close_matches(variable, known, n=3, cutoff=0.3) or sorted(known)[:3])
