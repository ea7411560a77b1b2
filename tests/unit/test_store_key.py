"""Keys: the same everywhere, reversible, and nothing else passes for one."""

from __future__ import annotations

import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libs.engine.kv.names import block_names, root_name
from libs.store.key import (
    KEY_BYTES,
    MAX_BLOCKS,
    ObjectKey,
    block_key,
    is_key,
    namespace,
    namespace_digest,
    tenant_tag,
)

ROOT = root_name("m", "l", "default")
NAMES = block_names(ROOT, range(32), 16)
GOLDEN = "ce4c8d40a86ddd35/37a8eec1ce19687d/go/j6zpd7xx6j5bggxf4esbndcdmdrvwhxmgo7uqx52zrjrlkx2"

tags = st.text("0123456789abcdef", min_size=16, max_size=16)
block_keys = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
object_keys = st.builds(
    ObjectKey, tags, tags, block_keys, st.lists(block_keys, min_size=1, max_size=MAX_BLOCKS).map(tuple)
)
KEY = ObjectKey(namespace("m", "l"), tenant_tag("default"), block_key(ROOT), tuple(map(block_key, NAMES)))


def test_the_golden_key() -> None:
    assert KEY.path() == GOLDEN
    assert ObjectKey.parse(GOLDEN) == KEY


@settings(deadline=None)
@given(object_keys)
@example(ObjectKey("0" * 16, "0" * 16, bytes(KEY_BYTES), (bytes(KEY_BYTES),)))  # leading zeros
@example(ObjectKey("0" * 16, "f" * 16, b"\xff" * KEY_BYTES, (b"\xff" * KEY_BYTES,) * MAX_BLOCKS))
def test_a_key_and_its_path_are_one_to_one(key: ObjectKey) -> None:
    assert ObjectKey.parse(key.path()) == key
    assert is_key(key.path())


@settings(deadline=None)
@given(object_keys)
def test_a_path_fits_a_file_system_and_s3(key: ObjectKey) -> None:
    path = key.path()
    assert len(path) <= 1024
    assert all(0 < len(part) <= 255 and part not in (".", "..") for part in path.split("/"))
    assert set(path) <= set(string.ascii_lowercase + string.digits + "/")


@settings(deadline=None)
@given(st.text() | st.from_regex(r"[0-9a-f]{16}/[0-9a-f]{16}/[a-z2-7]{2}/[a-z2-7]{32,64}", fullmatch=True))
def test_what_parses_is_what_was_formatted(text: str) -> None:
    try:
        key = ObjectKey.parse(text)
    except ValueError:
        assert not is_key(text)
    else:
        assert is_key(text)
        assert key.path() == text


@settings(deadline=None)
@given(object_keys, st.data())
def test_a_changed_path_is_another_key_or_none(key: ObjectKey, data: st.DataObject) -> None:
    path = key.path()
    at = data.draw(st.integers(0, len(path) - 1))
    changed = (
        path[:at]
        + data.draw(st.sampled_from(["", "a", "7", "1", "A", "/", ".", "\n", "é", "==", "\0"]))
        + path[at + 1 :]
    )
    if changed != path and is_key(changed):
        assert ObjectKey.parse(changed) != key


@pytest.mark.parametrize(
    "path",
    [
        "",
        KEY.path() + "\n",
        KEY.path() + "aaaaaaaa",  # half a key
        KEY.path().upper(),
        "/" + KEY.path(),
        KEY.path().rsplit("/", 1)[0],
        KEY.path().rsplit("/", 1)[0] + "/" + "a" * 16,  # a parent and no block
        KEY.path().rsplit("/", 2)[0] + "/aa/" + "a" * 16 * (MAX_BLOCKS + 2),
        KEY.path().rsplit("/", 2)[0] + "/ab/" + "a" * 32,  # in the wrong shard
        "../" + KEY.path(),
    ],
)
def test_other_paths_are_none(path: str) -> None:
    assert not is_key(path)
    with pytest.raises(ValueError, match="no key of an object"):
        ObjectKey.parse(path)


@pytest.mark.parametrize(
    "parts",
    [
        ("x" * 16, "0" * 16, bytes(10), (bytes(10),)),
        ("0" * 16, "0" * 15, bytes(10), (bytes(10),)),
        ("0" * 16, "0" * 16, bytes(9), (bytes(10),)),
        ("0" * 16, "0" * 16, bytes(10), ()),
        ("0" * 16, "0" * 16, bytes(10), (bytes(10), bytes(32))),
        ("0" * 16, "0" * 16, bytes(10), (bytes(10),) * (MAX_BLOCKS + 1)),
    ],
)
def test_parts_of_a_wrong_size_make_no_key(parts: tuple[str, str, bytes, tuple[bytes, ...]]) -> None:
    with pytest.raises(ValueError):
        ObjectKey(*parts)


def test_namespaces_and_tenants_do_not_run_into_each_other() -> None:
    assert len({namespace(*parts) for parts in [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]}) == 4
    assert namespace_digest("m", "l").hex().startswith(namespace("m", "l"))
    assert tenant_tag("a") != tenant_tag("b") and len(tenant_tag("../é\n")) == 16
