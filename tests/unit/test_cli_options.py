"""The command line: flags, environment, help."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from libs.service.config import ConfigError, Settings, load
from services.cli.main import EXIT_UNUSABLE, build_parser, main
from services.cli.options import ALL_FIELDS, add_settings, environment_of, settings_of

ROOT = Path(__file__).parents[2]


def parse(*arguments: str, environ: dict[str, str] | None = None) -> Settings:
    parser = argparse.ArgumentParser()
    add_settings(parser, ALL_FIELDS)
    return settings_of(parser.parse_args(arguments), environ or {})


def test_each_setting_has_a_flag() -> None:
    texts = {
        "log_level": "debug",
        "engine": "fake",
        "kernels": "avx2",
        "kv_dtype": "f32",
        "weights": "int8",
        "state_dir": "/tmp/x",
        "cache_dir": "/tmp/y",
        "instance_id": "a-1",
        "nats_url": "nats://127.0.0.1:7",
        "otlp_endpoint": "http://127.0.0.1:7",
        "transfers": "tcp",
        "store_policy": "s3fifo",
        "store_tenant_share": "0.7",
        "tls_cert": "/tmp/c",
        "tls_key": "/tmp/k",
    }
    for name in ALL_FIELDS:
        text = texts.get(name, "7")
        pair = ("--tls-cert", "/tmp/c", "--tls-key", "/tmp/k") if name.startswith("tls_") else ()
        settings = parse(f"--{name.replace('_', '-')}", text, *pair)
        assert str(getattr(settings, name)) in (text, f"{text}.0"), name


def test_flags_win_over_the_environment() -> None:
    assert parse("--port", "9000", environ={"BATON_PORT": "7000"}).port == 9000
    assert parse(environ={"BATON_PORT": "7000"}).port == 7000


def test_environment_of_makes_the_same_settings_again() -> None:
    settings = load({}, port=0, threads=3, otlp_endpoint="http://127.0.0.1:4318", state_dir=Path("/tmp/s p"))
    assert load(environment_of(settings)) == settings
    settings = replace(settings, threads=None, otlp_endpoint=None, kv_dtype="f32")
    assert load(environment_of(settings)) == settings


@pytest.mark.parametrize(
    "command", ["up", "gateway", "prefill", "decode", "cache", "status", "trace", "doctor", "chat"]
)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        build_parser().parse_args([command, "--help"])
    assert "--state-dir" in capsys.readouterr().out


def test_a_wrong_type_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["gateway", "--port", "eight"])
    assert "--port" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "-1", "65", "two"])
def test_a_number_of_workers_is_from_1_to_64(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["up", "--decode", count])
    assert "from 1 to 64" in capsys.readouterr().err


def test_an_unusable_setting_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_PROT", "1")
    assert main(["status"]) == EXIT_UNUSABLE
    error = capsys.readouterr().err
    assert error.startswith("baton: BATON_PROT is not a setting") and error.count("\n") == 1


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="BATON_NOPE"):
        parse(environ={"BATON_NOPE": "1"})


def test_help_loads_neither_torch_nor_a_service() -> None:
    code = (
        "import sys; from services.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'aiohttp', 'nats', 'gguf'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert not [name for name in sys.modules if name.startswith('services.') and '.cli' not in name]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "usage: baton" in done.stdout
