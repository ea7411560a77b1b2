"""The OpenAPI document is true: every route is in it, references lead somewhere, and nothing it allows is a 5xx."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway_rig import Rig, rig
from tests.natsd import nats_url

__all__ = ["nats_url"]


@pytest.fixture
async def r(nats_url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(nats_url, tmp_path) as made:
        (await made.decode()).say("Hello")
        yield made


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (value for name, value in node.items() if name == "$ref")
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


async def test_every_route_is_in_it_and_every_reference_leads_somewhere(r: Rig) -> None:
    status, document = await r.get("/openapi.json")
    assert status == 200 and document["openapi"] == "3.1.0"
    described = {(method.upper(), path) for path, one in document["paths"].items() for method in one}
    served = {
        (route.method, re.sub(r":[^}]*", "", route.resource.canonical))
        for route in r.gateway_routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert described == served
    found = set(references(document))
    names = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert found and found <= names


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_nothing_that_it_allows_is_a_5xx(r: Rig) -> None:
    """Schemathesis: valid and broken requests, against a gateway whose worker answers at once."""
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{r.url}/openapi.json",
        "--checks", "not_a_server_error", "--max-examples", "150", "--request-timeout", "10", "--no-color",
    ]  # fmt: skip
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=500, check=False
    )
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    await r.is_idle()
