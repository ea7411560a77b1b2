"""`baton doctor`: findings on good and on broken machines."""

from __future__ import annotations

import hashlib
import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from libs.kernels.native.compiler import Compiler
from libs.service.config import Settings, load
from services.cli import doctor
from services.cli.checks import hardware, kernels, network, runtime
from services.cli.checks.finding import Finding


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load({}, state_dir=tmp_path / "state")


def test_a_check_that_breaks_is_a_finding(settings: Settings) -> None:
    def broken(_: Settings) -> Finding:
        raise OSError("no such device")

    (finding,) = doctor.examine(settings, [broken])
    assert finding.level == "warn" and "no such device" in finding.fact


@pytest.mark.parametrize(("level", "status"), [("ok", 0), ("warn", 0), ("missing", 1)])
def test_exit_status_says_if_something_needed_is_missing(
    level: str,
    status: int,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    finding = Finding("thing", level, "a fact", "an advice")  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "CHECKS", (lambda _: finding,))
    assert doctor.run_doctor(settings, as_json=True) == status
    expected = {"name": "thing", "level": level, "fact": "a fact", "advice": "an advice"}
    assert json.loads(capsys.readouterr().out) == [expected]
    assert doctor.run_doctor(settings, as_json=False) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [level, "thing", "a", "fact"] and lines[1].strip() == "an advice"


def test_every_check_but_torch_answers_on_this_machine(settings: Settings) -> None:
    checks = [check for check in doctor.CHECKS if check is not runtime.torch]
    findings = doctor.examine(settings, checks)
    assert not [finding for finding in findings if "could not be checked" in finding.fact]
    assert not settings.state_dir.exists(), "looking must not change anything"


def test_torch_that_crashes_or_is_absent_is_missing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_TORCH_PROBE", "import no_such_torch")
    finding = runtime.torch(settings)
    assert finding.level == "missing" and "no_such_torch" in finding.fact
    monkeypatch.setattr(runtime, "_TORCH_PROBE", "import os; os.abort()")
    assert runtime.torch(settings).level == "missing"
    monkeypatch.setattr(runtime, "_TORCH_PROBE", "import time; time.sleep(30)")
    monkeypatch.setattr(runtime, "_TORCH_TIMEOUT_S", 0.2)
    assert runtime.torch(settings).level == "missing"


def test_a_torch_that_works_tells_its_device(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = """import json; print(json.dumps({"version": "9.9", "device": "cpu", "isa": "AVX2"}))"""
    monkeypatch.setattr(runtime, "_TORCH_PROBE", probe)
    assert runtime.torch(settings) == Finding("torch", "ok", "9.9 on cpu (AVX2)")


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    finding = runtime.model(load({}, model=str(tmp_path / "absent.gguf")))
    assert finding.level == "missing" and "absent.gguf" in finding.fact and "--model" in finding.advice


def test_a_state_directory_below_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding = runtime.state_dir(load({}, state_dir=tmp_path / "file" / "state"))
    assert finding.level == "missing" and "--state-dir" in finding.advice


def test_missing_programs(settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert kernels.compiler(settings).level == kernels.kernels(settings).level == "warn"
    assert "torch" in kernels.kernels(settings).fact and "g++" in kernels.kernels(settings).advice
    bound = replace(settings, engine="native")
    assert kernels.compiler(bound).level == kernels.kernels(bound).level == "missing"
    assert "do not start" in kernels.kernels(bound).fact
    unused = replace(settings, engine="torch")
    assert kernels.compiler(unused).level == kernels.kernels(unused).level == "ok"
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert runtime.nats_server(settings).level == "missing"


def test_kernels_are_told_as_they_lie_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache" / "kernels" / "avx2-1.so"
    monkeypatch.setattr(kernels, "find_compiler", lambda: Compiler(("c++",), "1"))
    monkeypatch.setattr(kernels, "library_path", lambda *_: path)
    settings = load({}, cache_dir=tmp_path / "cache")
    assert "will be compiled" in kernels.kernels(settings).fact and not path.parent.exists()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half a library")
    assert "will be compiled" in kernels.kernels(settings).fact
    path.write_bytes(b"library" + hashlib.sha256(b"library").digest())
    finding = kernels.kernels(settings)
    assert finding.level == "ok" and str(path) in finding.fact


def test_a_cache_that_cannot_be_written_costs_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "find_compiler", lambda: Compiler(("c++",), "1"))
    (tmp_path / "file").touch()
    finding = kernels.kernels(load({}, cache_dir=tmp_path / "file" / "cache"))
    assert finding.level == "warn" and "each start" in finding.fact and "--cache-dir" in finding.advice


def test_a_busy_port_is_a_warning(settings: Settings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = network.gateway_port(load({}, state_dir=settings.state_dir, port=port))
        assert finding.level == "warn" and str(port) in finding.fact
    assert network.gateway_port(load({}, state_dir=settings.state_dir, port=port)).level == "ok"


def test_a_collector_is_looked_for_only_where_one_is_named(settings: Settings) -> None:
    assert network.otlp_endpoint(settings).level == "ok"
    with socket.socket() as collector:
        collector.bind(("127.0.0.1", 0))
        collector.listen()
        url = f"http://127.0.0.1:{collector.getsockname()[1]}"
        assert network.otlp_endpoint(load({}, otlp_endpoint=url)).level == "ok"
    finding = network.otlp_endpoint(load({}, otlp_endpoint=url))
    assert finding.level == "warn" and url in finding.fact


def test_memory_really_is_passed(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware.passing_memory(settings).level == "ok"

    def refused(name: str) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("os.memfd_create", refused)
    assert hardware.passing_memory(settings).level == "missing"


def test_an_old_cpu_is_slow_not_broken(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: {"sse4_2"})
    assert hardware.cpu_features(settings).level == "warn"
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: {"avx2", "fma", "amx_tile"})
    assert hardware.cpu_features(settings) == Finding("cpu features", "ok", "avx2, fma, amx")
