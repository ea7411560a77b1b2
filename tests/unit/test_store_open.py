"""Where a store is: every form that is taken, and a clear word for the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from libs.store.file_store import FileStore
from libs.store.open import open_store
from libs.store.s3_store import S3Store
from tests.store_contract import blocks_come_back


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///var/kv", "/var/kv"),
        ("file://localhost/var/kv", "/var/kv"),
        ("file:///var/a%20b", "/var/a b"),
        ("/var/kv", "/var/kv"),
        ("/var/a b#c?d", "/var/a b#c?d"),
    ],
)
def test_folders(url: str, path: str) -> None:
    store = open_store(url)
    assert isinstance(store, FileStore)
    assert store.url == Path(path).as_uri()
    assert isinstance(open_store(store.url), FileStore)
    assert open_store(store.url).url == store.url


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
    ],
)
def test_buckets(url: str, canonical: str) -> None:
    store = open_store(url)
    assert isinstance(store, S3Store)
    assert store.url == canonical


@pytest.mark.parametrize(
    "url",
    [
        "",
        "kv",
        "./kv",
        "file://",
        "file://kv",
        "file://server/share",
        "file:kv",
        "file:///kv?x=1",
        "s3://",
        "s3:///prefix",
        "s3://bucket?region=eu",
        "gs://bucket",
        "http://server/bucket",
        "redis://server",
    ],
)
def test_everything_else_is_refused_with_what_is_taken(url: str) -> None:
    with pytest.raises(
        ValueError, match=r"file:///absolute/path, /absolute/path or s3://bucket\[/prefix\]"
    ) as caught:
        open_store(url)
    assert repr(url) in str(caught.value)


def test_opening_touches_nothing_and_files_need_no_s3_client(tmp_path: Path) -> None:
    program = "import sys, libs.store.open; libs.store.open.open_store(sys.argv[1]); print('obstore' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "kv")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "False"
    assert not (tmp_path / "kv").exists()


def test_what_is_opened_works(tmp_path: Path) -> None:
    blocks_come_back(open_store(f"file://{tmp_path}/kv"))
