"""`baton up` without processes: what a failed start tells."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from libs.service.config import Settings, load
from services.cli import up
from services.cli.child import ProcessSpec, RestartPolicy
from services.cli.plan import Plan
from services.cli.running import find

FAIL = """echo '{"level": "error", "event": "cannot serve", "error": "weights.gguf: truncated"}'; exit 1"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(up, "RestartPolicy", lambda: RestartPolicy(first_delay_s=0.01))
    # It would last for the tests that come after.
    monkeypatch.setattr("services.cli.up.logs.configure", lambda *_, **__: None)
    return load({}, state_dir=tmp_path / "state", port=0)


def test_a_worker_that_never_comes_up_ends_the_start_with_its_last_words(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = ProcessSpec("decode-1", ("/bin/sh", "-c", FAIL), {}, settings.log_dir / "decode-1.log", 1.0)
    monkeypatch.setattr(up, "make_plan", lambda *_, **__: Plan((), (), (spec,), ()))
    assert up.run_up(settings, prefill=1, decode=1, external_nats=False) == 1
    said = capsys.readouterr().err
    assert "decode-1 exited with status 1 5 times before it was ready" in said
    assert "  error: cannot serve, error=weights.gguf: truncated" in said
    assert said.endswith("stopping nats-1\nstopped\n")
    assert find(settings.state_dir) is None


def test_a_start_that_takes_too_long_ends(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = ProcessSpec("decode-1", ("/bin/sleep", "60"), {}, settings.log_dir / "decode-1.log", 1.0)
    monkeypatch.setattr(up, "make_plan", lambda *_, **__: Plan((), (), (spec,), ()))
    monkeypatch.setattr(up, "_START_TIMEOUT_S", 0.3)
    assert up.run_up(settings, prefill=1, decode=1, external_nats=False) == 1
    said = capsys.readouterr().err
    assert "not ready within 0.3 s: decode-1" in said
    assert said.endswith("stopped\n")


def test_a_bug_in_serving_still_drains(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: up._Up) -> str:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    monkeypatch.setattr(up._Up, "_start_nats", broken)
    with pytest.raises(ZeroDivisionError):
        up.run_up(settings, prefill=1, decode=1, external_nats=False)
    assert find(settings.state_dir) is None
