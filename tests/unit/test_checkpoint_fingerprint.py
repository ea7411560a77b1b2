"""Fingerprints: by content, remembered, and never stale."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from libs.checkpoint import fingerprint
from libs.checkpoint.open import CheckpointError, open_checkpoint
from tests.checkpoints import tiny_model, write_gguf, write_hf


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were hashed, in order."""
    names: list[str] = []
    digest = hashlib.file_digest

    def recording(file: object, name: str) -> object:
        names.append(Path(file.name).name)  # type: ignore[attr-defined]
        return digest(file, name)  # type: ignore[arg-type]

    monkeypatch.setattr(hashlib, "file_digest", recording)
    return names


def test_content_counts_and_place_does_not(tmp_path: Path) -> None:
    model = tiny_model()
    first = open_checkpoint(write_gguf(model, tmp_path / "a.gguf")).fingerprint(tmp_path / "cache")
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    assert open_checkpoint(tmp_path / "b.gguf").fingerprint(tmp_path / "cache") == first
    assert len(first) == 64 and int(first, 16)


def test_remembered(tmp_path: Path, hashed: list[str]) -> None:
    checkpoint = open_checkpoint(write_hf(tiny_model(), tmp_path / "tiny", shards=2))
    first = checkpoint.fingerprint(tmp_path / "cache")
    assert hashed == [
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    hashed.clear()
    assert open_checkpoint(tmp_path / "tiny").fingerprint(tmp_path / "cache") == first
    assert hashed == []
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [fingerprint.CACHE_FILE]


def test_perturbed_weights_of_the_same_name(tmp_path: Path) -> None:
    """One bit of one weight; size and modification time are kept, as `cp -p` would."""
    path = write_gguf(tiny_model(), tmp_path / "tiny.gguf")
    first = open_checkpoint(path).fingerprint(tmp_path)
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert open_checkpoint(path).fingerprint(tmp_path) != first


def test_config_counts(tmp_path: Path) -> None:
    folder = write_hf(tiny_model(), tmp_path / "tiny")
    first = open_checkpoint(folder).fingerprint(tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    assert open_checkpoint(folder).fingerprint(tmp_path) != first


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"x": {"size": 1}}', b"\xff", None])
def test_damaged_cache_is_ignored(tmp_path: Path, content: bytes | None) -> None:
    checkpoint = open_checkpoint(write_gguf(tiny_model(), tmp_path / "tiny.gguf"))
    first = checkpoint.fingerprint(tmp_path / "cache")
    cache_file = tmp_path / "cache" / fingerprint.CACHE_FILE
    if content is None:  # a digest that is none
        content = cache_file.read_bytes().replace(b'"sha256":"', b'"sha256":"zz')
    cache_file.write_bytes(content)
    assert checkpoint.fingerprint(tmp_path / "cache") == first


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tiny_model(), tmp_path / "tiny.gguf"))
    (tmp_path / "file").write_text("not a folder")
    assert checkpoint.fingerprint(tmp_path / "file") == checkpoint.fingerprint(tmp_path / "cache")


def test_two_models_share_a_cache(tmp_path: Path, hashed: list[str]) -> None:
    paths = [write_gguf(tiny_model(seed=seed), tmp_path / f"{seed}.gguf") for seed in range(2)]
    prints = {open_checkpoint(path).fingerprint(tmp_path) for path in paths}
    assert len(prints) == 2 and len(hashed) == 2
    assert {open_checkpoint(path).fingerprint(tmp_path) for path in paths} == prints
    assert len(hashed) == 2


def test_file_that_vanished(tmp_path: Path) -> None:
    path = write_gguf(tiny_model(), tmp_path / "tiny.gguf")
    checkpoint = open_checkpoint(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: cannot be read"):
        checkpoint.fingerprint(tmp_path)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: cannot be read"):
        checkpoint.tensor("norm.weight")


def test_file_cut_while_in_use(tmp_path: Path) -> None:
    path = write_gguf(tiny_model(), tmp_path / "tiny.gguf")
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"cut short while in use, in tensor 'output\.weight'"):
        checkpoint.tensor("head.weight")
