"""HTTPS, as a person sets it up: a certificate, its key, and clients that look at both."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.test_up import up


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """For 127.0.0.1, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=baton",
        "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_clients_that_verify_get_in_and_plain_http_does_not(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    with up(tmp_path / "state", "--tls-cert", str(cert), "--tls-key", str(key)) as running:
        running.until_ready()
        assert running.address.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(cert))
        with urllib.request.urlopen(running.address + "/v1/models", timeout=10, context=context) as response:
            assert response.status == 200
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(running.address + "/ready", timeout=10)
        with pytest.raises(OSError):
            urllib.request.urlopen(running.address.replace("https", "http") + "/ready", timeout=10)


def test_a_certificate_that_is_none_ends_the_start_with_its_name(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    _, key = certificate
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    with up(tmp_path / "state", "--tls-cert", str(wrong), "--tls-key", str(key)) as running:
        assert running.process.wait(60) != 0
        assert "gateway-1" in running.said and str(wrong) in running.said
