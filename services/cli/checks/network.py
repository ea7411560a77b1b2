"""Checks of ports and addresses."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from libs.service.config import ConfigError, Settings
from services.cli import running
from services.cli.checks.finding import Finding
from services.cli.machine import free_port

_CONNECT_TIMEOUT_S = 2.0
_NATS_PORT = 4222


def gateway_port(settings: Settings) -> Finding:
    name = f"port {settings.port}"
    live = running.find(settings.state_dir)
    if live is not None:
        return Finding(name, "ok", f"`baton up` runs (process {live.pid}) at {live.address or 'start'}")
    try:
        free_port(settings.host, settings.port)
    except ConfigError as error:
        return Finding(name, "warn", str(error))
    return Finding(name, "ok", f"free on {settings.host}")


def nats_port(_: Settings) -> Finding:
    """Only of interest for an own server: `baton up` takes any free port."""
    try:
        free_port("127.0.0.1", _NATS_PORT)
    except ConfigError:
        advice = f"`baton up` takes another one; to use that server: --nats nats://127.0.0.1:{_NATS_PORT}"
        return Finding(f"port {_NATS_PORT}", "warn", "in use, perhaps by a NATS server", advice)
    return Finding(f"port {_NATS_PORT}", "ok", "free")


def otlp_endpoint(settings: Settings) -> Finding:
    name = "traces"
    endpoint = settings.otlp_endpoint
    if not endpoint:
        return Finding(name, "ok", f"kept in {settings.trace_dir}; see them with `baton trace`")
    parts = urlsplit(endpoint)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_TIMEOUT_S):
            return Finding(name, "ok", f"a collector answers at {endpoint}")
    except OSError as error:
        advice = "start the collector, or unset OTEL_EXPORTER_OTLP_ENDPOINT; Baton serves without it"
        return Finding(name, "warn", f"no collector at {endpoint} ({error})", advice)
