"""The key file, and the command that changes it."""

from __future__ import annotations

import json
import stat
import threading
import time
from pathlib import Path

import pytest

from libs.service import keys
from libs.service.keys import KeyProblem
from libs.service.tenant import tenant_of_key
from services.cli.main import main


def test_a_secret_is_shown_once_and_kept_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "keys.json"
    key, secret = keys.add(path, "alice", requests_per_minute=10)
    text = path.read_text()
    assert secret.startswith(keys.PREFIX) and len(secret) > 40
    assert secret not in text and secret[3:20] not in text and key.digest in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.read(path) == (key,)
    assert key.tenant == tenant_of_key(secret)


def test_revoked_keys_stay_and_free_their_name(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first, _ = keys.add(path, "alice")
    with pytest.raises(KeyProblem, match="already"):
        keys.add(path, "alice")
    keys.revoke(path, "alice")
    second, _ = keys.add(path, "alice", tenant="team")
    keys.revoke(path, second.id)
    found = keys.read(path)
    assert [key.id for key in found] == [first.id, second.id]
    assert [key.problem(time.time_ns()) for key in found] == ["revoked", "revoked"]
    assert second.tenant == "tenant-team"
    with pytest.raises(KeyProblem, match="no key"):
        keys.revoke(path, "alice")


@pytest.mark.parametrize("name", ["", "a b", "../x", "ä", "a" * 65, "-a", "a\n"])
def test_names_are_plain(tmp_path: Path, name: str) -> None:
    with pytest.raises(KeyProblem, match="name"):
        keys.add(tmp_path / "keys.json", name)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', '{"keys": [{"id": 1}]}', '{"other": 1}'])
def test_a_damaged_file_is_an_error_and_is_not_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    for action in (lambda: keys.read(path), lambda: keys.add(path, "a"), lambda: keys.revoke(path, "a")):
        with pytest.raises(KeyProblem, match=r"keys\.json"):
            action()
    assert path.read_text() == text


def test_many_at_once_lose_none(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    threads = [threading.Thread(target=keys.add, args=(path, f"k{n}")) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in keys.read(path)} == {f"k{n}" for n in range(12)}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["keys", *arguments, "--state-dir", str(tmp_path)])
        said = capsys.readouterr()
        return code, said.out, said.err

    assert "everybody" in run("list")[1]
    code, out, err = run("add", "alice", "--tokens-per-minute", "500", "--expires-days", "0.5")
    assert code == 0 and out.startswith(keys.PREFIX) and "not kept" in err and "nobody without a key" in err
    code, out, err = run("add", "bob", "--json")
    assert code == 0 and set(json.loads(out)) == {"id", "name", "key"} and "nobody" not in err
    listed = {key["name"]: key for key in json.loads(run("list", "--json")[1])}
    assert listed["alice"]["tokens_per_minute"] == 500 and listed["bob"]["state"] == "valid"
    assert "digest" not in listed["alice"]
    assert run("revoke", "bob")[0] == 0
    table = run("list")[1]
    assert "revoked" in table and "alice" in table
    code, out, err = run("revoke", "nobody")
    assert (code, out) == (2, "") and "no key 'nobody'" in err
    with pytest.raises(SystemExit):
        run("add", "eve", "--requests-per-minute", "0")
