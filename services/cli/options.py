"""Flags of `baton`: one for each field of `Settings`, with the field's own type and default."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from libs.service.config import Settings, load

ALL_FIELDS = tuple(field.name for field in fields(Settings))

_ALIASES: Mapping[str, tuple[str, ...]] = {"nats_url": ("--nats",)}
_METAVARS: Mapping[str, str] = {
    "nats_url": "URL", "state_dir": "DIR", "cache_dir": "DIR", "instance_id": "ID", "otlp_endpoint": "URL",
    "store": "URL", "model": "PATH_OR_NAME", "served_name": "NAME", "host": "HOST", "port": "PORT",
    "tls_cert": "FILE", "tls_key": "FILE",
}  # fmt: skip
_HELP: Mapping[str, str] = {
    "nats_url": "NATS server to use; `baton up` starts an own one when none is named",
    "state_dir": "logs, sockets, traces and NATS data",
    "cache_dir": "compiled kernels and packed weights, shared by all processes of this machine",
    "instance_id": "name of this process (default: made from service, host and process id)",
    "log_level": "least level that is logged",
    "otlp_endpoint": "OpenTelemetry collector (default: traces are kept in the state directory)",
    "model": "a GGUF file, a Hugging Face folder, or an embedded model's name",
    "served_name": "what clients call the model (default: its own name)",
    "engine": "auto: native kernels where a C++ compiler makes them, else torch; fake: scripted tokens, for tests",
    "kernels": "instruction set of the native kernels (default: the best of this CPU)",
    "weights": "native: as the model stores them; int8: floats become 8-bit numbers, a quarter to half the memory",
    "threads": "CPU threads of each worker (default: from cores and workers)",
    "kv_block_size": "tokens in one KV block",
    "kv_dtype": "number format of the KV cache",
    "kv_cache_mib": "memory for KV blocks of each worker (default: an eighth of memory)",
    "max_batch": "sequences in one step",
    "max_step_tokens": "tokens in one step, so also the longest chunk of a prompt",
    "max_queue": "sequences that wait in one worker",
    "lease_s": "how long blocks stay pinned for a puller that says nothing",
    "pull_timeout_s": "how long pulling blocks may take",
    "transfers": "how KV blocks may move between workers, the best first; one that is left out is not used",
    "transfer_host": "address for KV transfers by TCP, told to peers (default: the one that reaches NATS)",
    "transfer_port": "port for KV transfers by TCP (default: any free one)",
    "heartbeat_s": "between two signs of life of a worker",
    "drain_timeout_s": "how long running requests may take to end when a service stops",
    "store": "where blocks outlive processes: file:///path, s3://bucket/prefix or none (auto: in the state directory)",
    "store_mib": "capacity of the store (default: a tenth of the disk, at most 64 GiB)",
    "store_ttl_s": "blocks that nobody used for so long are deleted (default: only for want of room)",
    "store_tenant_share": "of the store, the most that one tenant may fill",
    "store_policy": "what is deleted first when the store is full",
    "store_rescan_s": "between two listings of the store",
    "local_prefill_tokens": "decode computes an uncached suffix up to this itself",
    "host": "address the gateway listens on",
    "port": "port the gateway listens on; 0: any free one",
    "listen_fd": "a listening socket that was inherited, in place of host and port",
    "tls_cert": "certificate and chain (PEM): the gateway speaks HTTPS only",
    "tls_key": "its private key (PEM)",
    "max_inflight": "requests a gateway owns at once; more are refused",
    "request_timeout_s": "longest time of one request",
    "recovery_s": "how long a request that lost its worker waits for another",
    "default_max_tokens": "length of an answer where the client names none (default: the context)",
    "max_body_bytes": "largest request body",
}


def add_settings(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Adds one flag per named field. A flag that is not given leaves None: the environment decides."""
    hints = get_type_hints(Settings)
    group = parser.add_argument_group("settings", "Each can also be set as BATON_<NAME> in the environment.")
    by_name = {field.name: field for field in fields(Settings)}
    for name in names:
        kind, choices = _kind(hints[name])
        group.add_argument(
            *_ALIASES.get(name, ()),
            f"--{name.replace('_', '-')}",
            dest=name,
            type=kind,
            choices=choices,
            metavar=None if choices else _METAVARS.get(name, "N"),
            help=_help(by_name[name]),
        )


def settings_of(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """Environment and given flags, checked. Raises ConfigError, naming the setting."""
    given = {name: value for name, value in vars(arguments).items() if name in ALL_FIELDS}
    return load(environ, **given)


def environment_of(settings: Settings) -> dict[str, str]:
    """The `BATON_*` variables from which `load` makes these settings again."""
    values = {name: getattr(settings, name) for name in ALL_FIELDS}
    return {f"BATON_{name.upper()}": "" if value is None else str(value) for name, value in values.items()}


def _kind(hint: Any) -> tuple[Callable[[str], Any], tuple[str, ...] | None]:
    if isinstance(hint, UnionType):
        hint = next(choice for choice in get_args(hint) if choice is not type(None))
    if get_origin(hint) is Literal:
        return str, get_args(hint)
    assert hint in (str, int, float, Path), hint
    return hint, None


def _help(field: Field[Any]) -> str:
    default = "" if field.default in (None, "", MISSING) else f"(default: {field.default})"
    return f"{_HELP.get(field.name, '')} {default}".strip().replace("%", "%%")
