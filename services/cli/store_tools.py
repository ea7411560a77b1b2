"""`baton cache stats|verify|clear`: the durable KV store, from outside. `explain` is in its own file."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import sys
from collections import Counter
from typing import Final

from libs.service import logs
from libs.service.bus import Bus
from libs.service.bus_connection import redact
from libs.service.config import ConfigError, Settings
from libs.store.interface import ObjectDamaged, ObjectGone, Store, StoredObject
from libs.store.objects import check_object
from libs.store.open import open_store
from libs.wire.errors import BatonError
from libs.wire.messages import ServiceStatus
from services.cli.health import CONNECT_TIMEOUT_S, gather_status
from services.cli.progress import Progress

_WINDOW_S: Final = 0.6
_EXIT_FAILED: Final = 1
_STORE_FIELDS: Final = (
    ("store", "state"), ("store_url", "where"), ("store_objects", "objects"), ("store_blocks", "blocks"),
    ("store_mib", "MiB"), ("store_capacity_mib", "capacity, MiB"),
)  # fmt: skip
_WORKER_FIELDS: Final = (
    "store", "store_waiting", "store_written", "store_loaded", "store_lost", "store_dropped",
)  # fmt: skip


def run_stats(arguments: argparse.Namespace, settings: Settings) -> int:
    """What coordinators and workers say. Exit status 1 where nobody answers."""
    logs.configure("kv", "kv", settings, stream=io.StringIO())
    found = asyncio.run(_ask(settings.nats_url))
    if arguments.as_json:
        print(json.dumps({each.instance_id: each.detail for each in found}, indent=2))
    else:
        for line in stats_lines(found):
            print(line)
    if not found:
        print(
            f"baton: no service answers at {redact(settings.nats_url)}; is `baton up` running?",
            file=sys.stderr,
        )
        return _EXIT_FAILED
    return 0


def stats_lines(found: list[ServiceStatus]) -> list[str]:
    """For people: each coordinator's view of the store, each worker's traffic with it."""
    lines = []
    for status in found:
        detail = status.detail
        if status.service == "cache":
            lines.append(f"{status.instance_id}: {detail.get('names', 0)} blocks in the workers' pools")
            lines += [f"  store {text:<14} {detail[key]}" for key, text in _STORE_FIELDS if key in detail]
            lines += [
                f"  removed {key.removeprefix('store_removed_'):<12} {value}"
                for key, value in detail.items()
                if key.startswith("store_removed_")
            ]
        elif status.service in ("prefill", "decode"):
            parts = [f"{key.removeprefix('store_')} {detail[key]}" for key in _WORKER_FIELDS if key in detail]
            parts += [
                f"{key.removeprefix('store_load_')} {value}"
                for key, value in detail.items()
                if key.startswith("store_load_")
            ]
            lines.append(f"{status.instance_id}: {', '.join(parts)} (blocks)")
    return lines


def run_verify(arguments: argparse.Namespace, settings: Settings) -> int:
    """Exit status 1 where an object is damaged, and left. Raises StoreError where one cannot be read at all."""
    store = open_configured(settings)
    progress, damaged, checked = Progress(sys.stderr), [], 0
    try:
        for page in store.list():
            for each in page:
                if reason := _damage_of(store, each):
                    damaged.append((each.key, reason))
                    if arguments.delete:
                        store.delete(each.key)
                checked += 1
            progress.wait(f"checked {checked} objects, {len(damaged)} damaged")
    finally:
        store.close()
    if arguments.as_json:
        print(json.dumps({"checked": checked, "damaged": dict(damaged)}, indent=2))
    else:
        for key, reason in damaged:
            print(f"{key}: {reason}{', deleted' if arguments.delete else ''}")
        print(f"{checked} objects checked, {len(damaged)} damaged in {store.url}")
    return _EXIT_FAILED if damaged and not arguments.delete else 0


def _damage_of(store: Store, stored: StoredObject) -> str:
    """Only of what was read and is wrong: an object that cannot be read now is not to be deleted for it."""
    with contextlib.suppress(ObjectGone):  # evicted since it was listed
        try:
            check_object(store, stored.key)
        except ObjectDamaged as error:
            return error.message
    return ""


def run_clear(arguments: argparse.Namespace, settings: Settings) -> int:
    """Deletes all objects, of every model and tenant. Those who serve learn of it with their next listing."""
    store = open_configured(settings)
    try:
        if not arguments.yes and not _confirmed(f"Delete everything in {store.url}?"):
            return _EXIT_FAILED
        deleted: Counter[str] = Counter()
        for page in store.list():
            for each in page:
                store.delete(each.key)
                deleted["objects"] += 1
                deleted["bytes"] += each.num_bytes
    finally:
        store.close()
    if arguments.as_json:
        print(json.dumps(deleted))
    else:
        print(f"deleted {deleted['objects']} objects, {deleted['bytes'] / 2**20:.1f} MiB")
    return 0


def open_configured(settings: Settings) -> Store:
    """Raises ConfigError where there is no store, or its URL is none."""
    if settings.store_url is None:
        raise ConfigError("store=none: there is no store")
    try:
        return open_store(settings.store_url)
    except ValueError as error:
        raise ConfigError(f"store: {error}") from None


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("not a terminal: say --yes")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


async def _ask(nats_url: str) -> list[ServiceStatus]:
    try:
        bus = await Bus.connect(nats_url, "baton-kv", timeout_s=CONNECT_TIMEOUT_S)
    except BatonError:
        return []
    async with bus:
        return await gather_status(bus, _WINDOW_S)
