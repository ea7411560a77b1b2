"""`baton status`: every process that answers on the bus, as a table or as JSON."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Sequence

import msgspec

from libs.service import logs
from libs.service.bus import Bus
from libs.service.bus_connection import redact
from libs.service.config import Settings
from libs.wire.errors import BatonError
from libs.wire.messages import ServiceStatus
from services.cli.health import CONNECT_TIMEOUT_S, gather_status

_WINDOW_S = 0.6
_EXIT_NOBODY = 1
_HEADER = ("SERVICE", "ID", "STATE", "MODEL", "RUNNING", "WAITING", "BLOCKS free/cached/total", "ADDRESS")


def run_status(settings: Settings, as_json: bool) -> int:
    """Prints who is there. Exit status 1, with a line that says where was looked, when nobody is."""
    logs.configure("status", "status", settings, stream=io.StringIO())  # errors are told below, once
    try:
        found = asyncio.run(_ask(settings.nats_url))
    except BatonError as error:
        print(f"baton: {error}", file=sys.stderr)
        return _EXIT_NOBODY
    if as_json:
        print(json.dumps([msgspec.to_builtins(status) for status in found], indent=2))
    elif found:
        print(table([_HEADER, *(row(status) for status in found)]))
    if not found:
        print(
            f"baton: no service answers at {redact(settings.nats_url)}; is `baton up` running?",
            file=sys.stderr,
        )
        return _EXIT_NOBODY
    return 0


async def _ask(nats_url: str) -> list[ServiceStatus]:
    bus = await Bus.connect(nats_url, "baton-status", timeout_s=CONNECT_TIMEOUT_S)
    async with bus:
        return await gather_status(bus, _WINDOW_S)


def row(status: ServiceStatus) -> tuple[str, ...]:
    """The columns of `_HEADER`; `-` where a kind of process has none."""
    load = status.load
    running = load.running if load is not None else status.inflight
    return (
        status.service,
        status.instance_id,
        _state(status),
        status.model or "-",
        "-" if running is None else str(running),
        "-" if load is None else f"{load.waiting}/{load.queue_limit}",
        "-" if load is None else f"{load.blocks_free}/{load.blocks_cached}/{load.blocks_total}",
        status.address or "-",
    )


def _state(status: ServiceStatus) -> str:
    """With what is wrong, if a process serves all the same."""
    store = status.detail.get("store", "ok")
    return status.state if store in ("ok", "none") else f"{status.state} (store: {store})"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(each, widths, strict=True)) for each in rows)
    return "\n".join(line.rstrip() for line in lines)
