"""Settings: where they come from, and that one which cannot be used is refused by name."""

from __future__ import annotations

import os
import socket
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from libs.service.config import ConfigError, Settings, instance_id, load
from libs.wire.subjects import check_id


class TestSources:
    def test_defaults(self) -> None:
        settings = load({})
        assert settings.port == 8000
        assert settings.threads is None
        assert settings.state_dir.is_absolute()
        assert settings.trace_dir == settings.state_dir / "traces"

    def test_variables_and_flags(self) -> None:
        environ = {
            "BATON_PORT": "9000",
            "BATON_HOST": "0.0.0.0",
            "BATON_LEASE_S": "2.5",
            "HOME": "/h",
            "X": "y",
        }
        settings = load(environ, port=9001, threads=None)
        assert (settings.port, settings.host, settings.lease_s) == (9001, "0.0.0.0", 2.5)

    def test_each_setting_has_a_variable(self) -> None:
        """None has a type that a variable's text cannot be turned into."""
        for field in fields(Settings):
            value = getattr(Settings(), field.name)
            text = {
                "threads": "2",
                "kv_cache_mib": "64",
                "default_max_tokens": "5",
                "served_name": "m",
                "store_mib": "9",
                "store_ttl_s": "60.0",
                "listen_fd": "3",
                "tls_cert": "/c",
                "tls_key": "/k",
            }.get(field.name, "http://c" if field.name == "otlp_endpoint" else str(value))
            both = {"BATON_TLS_CERT": "/c", "BATON_TLS_KEY": "/k"} if field.name.startswith("tls_") else {}
            loaded = getattr(load({**both, f"BATON_{field.name.upper()}": text}), field.name)
            if field.name not in ("state_dir", "cache_dir"):
                assert type(loaded) is (type(value) if value is not None else type(loaded))
                assert str(loaded) == text

    def test_a_certificate_without_its_key_is_no_use(self) -> None:
        with pytest.raises(ConfigError, match="give both"):
            load({"BATON_TLS_CERT": "/c"})

    def test_empty_means_none_where_none_is_possible(self) -> None:
        settings = load({"BATON_THREADS": "", "BATON_SERVED_NAME": ""})
        assert (settings.threads, settings.served_name) == (None, None)

    def test_the_standard_variable_for_traces(self) -> None:
        otel = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://jaeger:4318"}
        assert load(otel).otlp_endpoint == "http://jaeger:4318"
        assert load({**otel, "BATON_OTLP_ENDPOINT": "http://mine"}).otlp_endpoint == "http://mine"
        assert load({**otel, "BATON_OTLP_ENDPOINT": ""}).otlp_endpoint is None  # off, for Baton alone
        assert load({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}).otlp_endpoint is None

    def test_home_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/somebody")
        assert load({}).state_dir == Path("/home/somebody/.local/state/baton")
        assert load({"BATON_STATE_DIR": "~/x"}).state_dir == Path("/home/somebody/x")

    def test_a_relative_directory_becomes_absolute(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for settings in (
            load({"BATON_STATE_DIR": "s"}),
            load({}, state_dir="s"),
            load({}, state_dir=Path("s")),
        ):
            assert settings.state_dir == tmp_path / "s"

    def test_settings_do_not_change(self) -> None:
        with pytest.raises(FrozenInstanceError):
            load({}).port = 1  # type: ignore[misc]


class TestRefusals:
    @pytest.mark.parametrize(
        ("variable", "text", "says"),
        [
            ("BATON_PORT", "http", "whole number"),
            ("BATON_PORT", "80.5", "whole number"),
            (
                "BATON_PORT",
                "tcp://10.0.0.7:8000",
                "whole number",
            ),  # Kubernetes sets this for a service `baton`
            ("BATON_PORT", "65536", "65535"),
            ("BATON_PORT", "-1", "65535"),
            ("BATON_LEASE_S", "soon", "finite number"),
            ("BATON_LEASE_S", "nan", "finite number"),
            ("BATON_REQUEST_TIMEOUT_S", "inf", "finite number"),
            ("BATON_HEARTBEAT_S", "0", "above 0"),
            ("BATON_THREADS", "0", "above 0"),
            ("BATON_KV_CACHE_MIB", "-5", "above 0"),
            ("BATON_DRAIN_TIMEOUT_S", "-1", "0 or more"),
            ("BATON_LOCAL_PREFILL_TOKENS", "-1", "0 or more"),
            ("BATON_LOG_LEVEL", "loud", "debug, info, warning, error"),
            ("BATON_KV_DTYPE", "", "f16, f32"),
            ("BATON_ENGINE", "Torch", "torch, fake"),
            ("BATON_NATS_URL", "", "empty"),
            ("BATON_MODEL", " ", "empty"),
            ("BATON_STATE_DIR", "", "directory"),
            ("BATON_STATE_DIR", "~nobody-of-that-name/x", "home"),
            ("BATON_OTLP_ENDPOINT", "localhost:4317", "http://"),
            ("BATON_INSTANCE_ID", "a.b", "must be"),
        ],
    )
    def test_a_variable_that_cannot_be_used(self, variable: str, text: str, says: str) -> None:
        name = variable.removeprefix("BATON_").lower()
        with pytest.raises(ConfigError) as caught:
            load({variable: text})
        assert says in str(caught.value)
        assert variable in str(caught.value) or name in str(caught.value)

    @pytest.mark.parametrize(
        ("flag", "value", "says"),
        [
            ("log_level", "loud", "--log-level='loud'"),
            ("port", 70000, "port=70000"),
            ("port", "x", "--port='x'"),
            ("heartbeat_s", float("nan"), "--heartbeat-s='nan'"),
            ("max_batch", 0, "max_batch=0"),
        ],
    )
    def test_a_flag_that_cannot_be_used(self, flag: str, value: object, says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            load({}, **{flag: value})

    def test_a_misspelt_variable(self) -> None:
        with pytest.raises(ConfigError, match=r"BATON_PROT is not a setting.*BATON_PORT"):
            load({"BATON_PROT": "1"})


class TestInstanceIds:
    def test_a_configured_one(self) -> None:
        assert instance_id(load({"BATON_INSTANCE_ID": "decode-7"}), "decode") == "decode-7"
        with pytest.raises(ValueError, match="must be"):
            instance_id(Settings(instance_id="a b"), "decode")

    @pytest.mark.parametrize(
        "host", ["box", "größe.local", "名", "", "x" * 300, "a.b.c", f"release-{'x' * 60}-7d9f8b6c5d-abcde"]
    )
    def test_one_made_up_is_fit_for_subjects(self, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        made = instance_id(Settings(), "prefill")
        assert check_id(made) == made == instance_id(Settings(), "prefill")
        assert made.startswith("prefill-")
        assert made.endswith(f"-{os.getpid()}")

    def test_pods_with_long_names_differ(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = set()
        for pod in ("abcde", "fghij"):
            monkeypatch.setattr(socket, "gethostname", lambda pod=pod: f"{'release-' * 9}{pod}")
            made.add(instance_id(Settings(), "decode"))
        assert len(made) == 2


def test_transports_are_checked_by_name() -> None:
    assert load({}).transfers == "shm,tcp" and load({"BATON_TRANSFERS": "tcp"}).transfers == "tcp"
    with pytest.raises(ConfigError, match=r"transfers='warp'.*'warp', only shm, nixl, tcp"):
        load({"BATON_TRANSFERS": "warp"})
    with pytest.raises(ConfigError, match="transfer_port"):
        load({"BATON_TRANSFER_PORT": "70000"})
