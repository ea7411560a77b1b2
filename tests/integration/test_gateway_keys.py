"""Keys at the gateway's door: what is open, what is not, and how much a key may do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from libs.service import keys
from services.gateway import access
from tests.gateway_rig import Rig, chat, completion, hang, rig, until
from tests.natsd import nats_url

__all__ = ["nats_url"]

COMPLETIONS = "/v1/completions"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "LOOK_S", 0.0)


@pytest.fixture
async def r(nats_url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(nats_url, tmp_path) as made:
        (await made.decode()).say("Hello")
        yield made


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


async def ask(r: Rig, secret: str, **fields: Any) -> tuple[int, Any]:
    return await r.post(COMPLETIONS, completion(max_tokens=5, **fields), headers=bearer(secret))


async def test_without_a_key_file_everybody_may_come_in(r: Rig) -> None:
    assert (await ask(r, ""))[0] == 200 and (await ask(r, "anything"))[0] == 200


async def test_every_route_but_liveness_is_closed_once_there_is_a_key(r: Rig, tmp_path: Path) -> None:
    """Row 15: all routes that there are, and some that there are not."""
    _, secret = keys.add(tmp_path / "keys.json", "alice")
    routes = {(route.method, route.resource.canonical) for route in r.gateway_routes() if route.resource}
    assert ("POST", "/v1/messages") in routes and ("GET", "/metrics") in routes
    routes |= {("GET", "/nowhere"), ("POST", "/health/../v1/completions"), ("GET", "/v1/completions")}
    for method, path in sorted(routes):
        url = r.url + path.replace("{model}", "m")
        for headers in ({}, bearer("bk-wrong"), {"x-api-key": secret + "x"}):
            async with r.session.request(method, url, headers=headers, json={}) as response:
                if path in ("/health", "/ready"):
                    assert response.status == 200
                else:
                    assert response.status == 401, (method, path, headers)
                    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert (await ask(r, secret))[0] == 200
    async with r.session.get(r.url + "/v1/models", headers={"x-api-key": secret}) as response:
        assert response.status == 200


async def test_refusals_in_both_languages_do_not_tell_whether_there_was_such_a_key(
    r: Rig, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    keys.add(path, "alice")
    _, gone = keys.add(path, "bob")
    keys.revoke(path, "bob")
    _, late = keys.add(path, "carol", expires_ns=time.time_ns() - 1)
    unknown, revoked = await ask(r, "bk-never"), await ask(r, gone)
    assert unknown == revoked
    assert (unknown[0], unknown[1]["error"]["code"]) == (401, "invalid_api_key")
    assert "expired" in (await ask(r, late))[1]["error"]["message"]
    status, answer = await r.post("/v1/messages", chat())
    assert (status, answer["type"], answer["error"]["type"]) == (401, "error", "authentication_error")


async def test_keys_are_taken_in_and_refused_while_it_runs(r: Rig, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    assert (await ask(r, ""))[0] == 200
    _, secret = keys.add(path, "alice")
    assert [
        (
            await ask(
                r,
                "",
            )
        )[0],
        (await ask(r, secret))[0],
    ] == [401, 200]
    path.write_text("{ half")
    assert [(await ask(r, ""))[0], (await ask(r, secret))[0]] == [401, 200], "as it was"
    path.unlink()
    assert [(await ask(r, ""))[0], (await ask(r, secret))[0]] == [401, 200], "a lost file opens nothing"
    keys.add(path, "bob")
    assert (await ask(r, secret))[0] == 401


async def test_tenants_are_those_of_the_keys(r: Rig, tmp_path: Path) -> None:
    path, worker = tmp_path / "keys.json", r.workers[0]
    secrets = [
        keys.add(path, name, tenant=tenant)[1] for name, tenant in (("a", "t"), ("b", "t"), ("c", None))
    ]
    for secret in secrets:
        await ask(r, secret)
    first, second, third = (request.tenant for request in worker.requests)
    assert first == second == "tenant-t" != third


async def test_requests_per_minute(r: Rig, tmp_path: Path) -> None:
    _, secret = keys.add(tmp_path / "keys.json", "alice", requests_per_minute=3)
    statuses = [(await ask(r, secret))[0] for _ in range(5)]
    assert statuses == [200, 200, 200, 429, 429]
    async with r.session.post(r.url + COMPLETIONS, json=completion(), headers=bearer(secret)) as response:
        assert 1 <= int(response.headers["Retry-After"]) <= 20
        assert (await response.json())["error"]["code"] == "rate_limit_exceeded"


async def test_tokens_per_minute_are_charged_when_they_are_known(r: Rig, tmp_path: Path) -> None:
    _, secret = keys.add(tmp_path / "keys.json", "alice", tokens_per_minute=100)
    status, answer = await ask(r, secret, prompt=[5] * 150)
    assert status == 200 and answer["usage"]["total_tokens"] > 100
    assert (await ask(r, secret))[0] == 429


async def test_so_many_at_once(r: Rig, tmp_path: Path) -> None:
    _, secret = keys.add(tmp_path / "keys.json", "alice", at_once=2)
    worker = r.workers[0]
    worker.behaviour = hang
    running = [asyncio.create_task(ask(r, secret)) for _ in range(2)]
    await until(lambda: len(worker.requests) == 2, "two requests")
    assert (await ask(r, secret))[0] == 429
    running[0].cancel()
    await until(lambda: r.gateway.admission.inflight == 1, "one fewer")
    running.append(asyncio.create_task(ask(r, secret)))
    await until(lambda: len(worker.requests) == 3, "the third")
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await r.is_idle()
