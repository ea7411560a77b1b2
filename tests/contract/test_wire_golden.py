"""The bytes of every message, as a process of another version would send them.

A fixture is never changed: a message that needs other bytes needs another version in its tag, and with it
another fixture. `python -m tests.contract.test_wire_golden` writes the fixtures that are missing.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import msgspec
import pytest

from libs.wire import messages, store_messages
from libs.wire.codec import decode, encode
from libs.wire.messages import Message
from tests.contract.wire_examples import EXAMPLES

FIXTURES = Path(__file__).parent / "fixtures"
KINDS = sorted(
    (
        kind
        for kind in {**vars(messages), **vars(store_messages)}.values()
        if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
    ),
    key=lambda kind: kind.__name__,
)
BY_KIND = {type(example): example for example in EXAMPLES}


def tag_of(kind: type[Message]) -> str:
    tag = kind.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


def fixture_path(kind: type[Message]) -> Path:
    """E.g. fixtures/offer-failed.1.hex"""
    return FIXTURES / f"{tag_of(kind).replace('/', '.')}.hex"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
class TestGolden:
    def test_bytes(self, kind: type[Message]) -> None:
        golden = bytes.fromhex(fixture_path(kind).read_text())
        assert encode(BY_KIND[kind]) == golden, (
            f"{kind.__name__} is sent differently than before: new version?"
        )
        assert decode(golden, kind) == BY_KIND[kind]

    def test_the_tag_has_a_version(self, kind: type[Message]) -> None:
        name, _, version = tag_of(kind).partition("/")
        assert name
        assert int(version) >= 1

    def test_the_example_has_no_default_in_it(self, kind: type[Message]) -> None:
        """So that a field that is renamed or goes missing shows in the bytes."""
        example = BY_KIND[kind]
        for field in msgspec.structs.fields(kind):
            assert field.required or getattr(example, field.name) != field.default, field.name


def test_every_fixture_belongs_to_a_message() -> None:
    assert {path.name for path in FIXTURES.iterdir()} == {fixture_path(kind).name for kind in KINDS}


def test_tags_are_unique() -> None:
    assert len({tag_of(kind) for kind in KINDS}) == len(KINDS)


if __name__ == "__main__":
    FIXTURES.mkdir(exist_ok=True)
    for each in KINDS:
        if not fixture_path(each).exists():
            fixture_path(each).write_text("\n".join(textwrap.wrap(encode(BY_KIND[each]).hex(), 100)) + "\n")
