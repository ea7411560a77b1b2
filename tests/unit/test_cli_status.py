"""`baton status`: rows, and what it says when nobody is there."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from libs.service.config import Settings, load
from libs.wire.messages import Load, ServiceStatus
from services.cli.machine import free_port
from services.cli.main import main
from services.cli.running import Running, StateLock
from services.cli.status import row, table

LOAD = Load(waiting=1, running=2, blocks_free=3, blocks_cached=4, blocks_total=9, queue_limit=256)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command configures the logging of its process."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def status(service: str, **more: object) -> ServiceStatus:
    fixed = {"instance_id": f"{service}-1", "host": "h", "pid": 1, "started_ns": 0, "state": "serving"}
    return ServiceStatus(service=service, **(fixed | more))  # type: ignore[arg-type]


def test_a_worker_shows_its_load() -> None:
    cells = row(status("decode", model="smol", load=LOAD))
    assert cells == ("decode", "decode-1", "serving", "smol", "2", "1/256", "3/4/9", "-")


def test_a_gateway_shows_its_requests_and_address() -> None:
    cells = row(status("gateway", inflight=0, address="http://127.0.0.1:8000"))
    assert cells == ("gateway", "gateway-1", "serving", "-", "0", "-", "-", "http://127.0.0.1:8000")


def test_a_store_that_fails_shows_while_the_worker_serves() -> None:
    assert row(status("decode", detail={"store": "no space left"}))[2] == "serving (store: no space left)"
    for quiet in ("ok", "none"):
        assert row(status("decode", detail={"store": quiet}))[2] == "serving"


def test_columns_line_up() -> None:
    lines = table([("A", "B"), ("long", "x"), ("s", "-")]).splitlines()
    assert lines == ["A     B", "long  x", "s     -"]


def test_nobody_there_is_exit_status_1_and_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.cli.status.CONNECT_TIMEOUT_S", 0.3)
    port = free_port("127.0.0.1", 0)
    assert main(["status", "--nats", f"nats://127.0.0.1:{port}", "--state-dir", str(tmp_path)]) == 1
    out, error = capfd.readouterr()
    assert out == "" and error.count("\n") == 1
    assert str(port) in error and "baton up" in error


def test_settings_of_a_running_up_are_found_without_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.delenv("BATON_NATS_URL", raising=False)

    def run_status(settings: Settings, as_json: bool) -> int:
        seen.append(settings.nats_url)
        return 0

    monkeypatch.setattr("services.cli.status.run_status", run_status)
    with StateLock(tmp_path) as lock:
        lock.publish(Running(1, "nats://127.0.0.1:7777", None))
        main(["status", "--state-dir", str(tmp_path)])
        main(["status", "--state-dir", str(tmp_path), "--nats", "nats://127.0.0.1:1"])
    main(["status", "--state-dir", str(tmp_path)])
    assert seen == ["nats://127.0.0.1:7777", "nats://127.0.0.1:1", load({}).nats_url]
