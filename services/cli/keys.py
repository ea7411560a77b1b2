"""`baton keys`: who may use the gateway."""

from __future__ import annotations

import argparse
import json
import time
from datetime import UTC, datetime

from rich import box
from rich.console import Console
from rich.table import Table

from libs.service import keys
from libs.service.config import ConfigError, Settings
from libs.service.keys import ApiKey, KeyProblem

_DAY_NS = 86_400 * 10**9


def run_keys(arguments: argparse.Namespace, settings: Settings) -> int:
    """One of add, list and revoke. Raises ConfigError."""
    actions = {"add": _add, "list": _list, "revoke": _revoke}
    try:
        actions[arguments.action](arguments, settings)
    except KeyProblem as error:
        raise ConfigError(str(error)) from None
    return 0


def _add(arguments: argparse.Namespace, settings: Settings) -> None:
    is_first = not keys.read(settings.keys_file)
    days: float | None = arguments.expires_days
    key, secret = keys.add(
        settings.keys_file,
        arguments.name,
        tenant=arguments.tenant,
        expires_ns=None if days is None else time.time_ns() + int(days * _DAY_NS),
        requests_per_minute=arguments.requests_per_minute,
        tokens_per_minute=arguments.tokens_per_minute,
        at_once=arguments.at_once,
    )
    if arguments.as_json:
        print(json.dumps({"id": key.id, "name": key.name, "key": secret}))
        return
    print(secret)
    note = Console(stderr=True, highlight=False)
    note.print(f"The key of {key.name} ({key.id}). It is not kept: note it now.")
    if is_first:
        note.print("From now on, gateways that use this state directory answer nobody without a key.")


def _list(arguments: argparse.Namespace, settings: Settings) -> None:
    found, now_ns = keys.read(settings.keys_file), time.time_ns()
    if arguments.as_json:
        shown = (
            "id",
            "name",
            "tenant",
            "created_ns",
            "expires_ns",
            "requests_per_minute",
            "tokens_per_minute",
            "at_once",
        )
        print(
            json.dumps(
                [
                    {name: getattr(key, name) for name in shown} | {"state": _state(key, now_ns)}
                    for key in found
                ]
            )
        )
        return
    if not found:
        print(f"no keys in {settings.keys_file}: everybody may use the gateway")
        return
    table = Table("ID", "NAME", "STATE", "TENANT", "LIMITS", "CREATED", "EXPIRES", box=box.SIMPLE_HEAD)
    for key in found:
        table.add_row(
            key.id,
            key.name,
            _state(key, now_ns),
            key.tenant,
            _limits(key),
            _date(key.created_ns),
            _date(key.expires_ns),
        )
    Console(highlight=False).print(table)


def _revoke(arguments: argparse.Namespace, settings: Settings) -> None:
    key = keys.revoke(settings.keys_file, arguments.name)
    print(f"{key.name} ({key.id}) is revoked; gateways know within seconds, and end nothing that runs")


def _state(key: ApiKey, now_ns: int) -> str:
    return key.problem(now_ns) or "valid"


def _limits(key: ApiKey) -> str:
    parts = (
        (key.requests_per_minute, "requests/min"),
        (key.tokens_per_minute, "tokens/min"),
        (key.at_once, "at once"),
    )
    return ", ".join(f"{value} {unit}" for value, unit in parts if value is not None) or "none"


def _date(ns: int | None) -> str:
    return "" if ns is None else datetime.fromtimestamp(ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M")
