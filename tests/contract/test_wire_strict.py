"""Whatever is wrong with a message, decoding it raises DecodeError and says where."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.wire.codec import decode, encode
from libs.wire.errors import Code, DecodeError
from libs.wire.messages import Accepted, DumpRequest, Generate, Heartbeat, Message, Pin, Release, StepOutput
from tests.contract.wire_examples import EXAMPLES

Path = tuple[str | int, ...]
WRONG: tuple[object, ...] = (None, True, 3, "text", 2.5, b"\xff", [], {}, [[]], {"x": 1})
by_name = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)


def raw(message: Message) -> dict[str, Any]:
    """The message as maps, lists and scalars."""
    found: dict[str, Any] = msgspec.msgpack.decode(encode(message))
    return found


def places(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """Every value inside `value`, with the keys and positions that lead to it."""
    if path:
        yield path, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*path, index))


def put(message: dict[str, Any], path: Path, value: object) -> dict[str, Any]:
    changed: Any = copy.deepcopy(message)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed  # type: ignore[no-any-return]


def error_of(message: dict[str, Any], kind: type[Message]) -> str:
    with pytest.raises(DecodeError) as caught:
        decode(msgspec.msgpack.encode(message), kind)
    assert caught.value.code == Code.BAD_MESSAGE
    assert not caught.value.retryable
    return caught.value.message


def names_place(error: str, path: Path) -> bool:
    """Whether `error` names the innermost field of `path`; positions and free keys come as [...]."""
    fields = [key for key in path if isinstance(key, str)]
    return any(f"{quote}{fields[0]}" in error for quote in ("$.", "`")) and (
        f".{fields[-1]}" in error or f"`{fields[-1]}`" in error or "[...]" in error
    )


@by_name
class TestOneThingWrong:
    def test_a_required_field_is_missing(self, example: Message) -> None:
        kind = type(example)
        for field in msgspec.structs.fields(kind):
            message = raw(example)
            del message[field.name]
            if field.required:
                assert f"`{field.name}`" in error_of(message, kind)
            else:
                assert getattr(decode(msgspec.msgpack.encode(message), kind), field.name) == (
                    field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
                )

    def test_a_required_field_of_a_part_is_missing(self, example: Message) -> None:
        for path, value in places(raw(example)):
            if not isinstance(value, dict) or path == ("detail",):
                continue
            for key in value:
                part = {name: inner for name, inner in value.items() if name != key}
                message = put(raw(example), path, part)
                try:
                    decode(msgspec.msgpack.encode(message), type(example))
                except DecodeError as error:
                    assert f"`{key}`" in error.message
                    assert str(path[0]) in error.message

    def test_a_field_has_another_type(self, example: Message) -> None:
        tried = 0
        for path, value in places(raw(example)):
            for wrong in WRONG:
                if _may_stand_in_for(wrong, value, path, type(example)):
                    continue
                assert names_place(error_of(put(raw(example), path, wrong), type(example)), path), (
                    path,
                    wrong,
                )
                tried += 1
        assert tried >= 8  # the tag at least

    def test_an_unknown_field(self, example: Message) -> None:
        assert "`surprise`" in error_of({**raw(example), "surprise": 1}, type(example))
        for path, value in places(raw(example)):
            if isinstance(value, dict) and path != ("detail",):
                message = put(raw(example), path, {**value, "surprise": 1})
                assert "`surprise`" in error_of(message, type(example))

    def test_another_version_or_none(self, example: Message) -> None:
        kind = type(example)
        tag = raw(example)["type"]
        name, _, version = tag.partition("/")
        others = (f"{name}/{int(version) + 1}", f"{name}/{int(version) - 1}", name, "nothing/0", "")
        for other in others:
            error = error_of({**raw(example), "type": other}, kind)
            assert repr(other) in error
            assert "`$.type`" in error
        message = raw(example)
        del message["type"]
        assert "`type`" in error_of(message, kind)

    def test_another_kind(self, example: Message) -> None:
        other = Release if isinstance(example, Accepted) else Accepted
        error = error_of(raw(example), other)
        assert raw(example)["type"] in error
        assert other.__name__ in error

    def test_bytes_are_missing_or_too_many(self, example: Message) -> None:
        data = encode(example)
        for length in range(len(data)):
            with pytest.raises(DecodeError):
                decode(data[:length], type(example))
        with pytest.raises(DecodeError, match="trailing"):
            decode(data + b"\x00", type(example))


NULLABLE = {
    "prefill",
    "first",
    "logprob",
    "logprobs",
    "retry_after_s",
    "next_offset",
    "model",
    "address",
    "load",
}
NULLABLE |= {"inflight", "sent_ns"}
CLOSED = {"type", "kind", "role", "service"}  # texts of which only some are taken
CLOSED_IN = {(Heartbeat, "state"), (StepOutput, "reason")}


def _may_stand_in_for(wrong: object, value: object, path: Path, kind: type[Message]) -> bool:
    """Whether `wrong` is of a type that the field takes, so that decoding has nothing to find."""
    name = path[-1]
    if wrong is None:
        is_delta = kind is StepOutput and path[:2] == ("outputs", 0)
        return name in NULLABLE or (name == "cached" and is_delta)
    if path[0] == "detail" and len(path) == 2:  # free: texts and numbers
        return isinstance(wrong, str | int | float) and not isinstance(wrong, bool)
    if isinstance(wrong, bool) or isinstance(value, bool):
        return isinstance(wrong, bool) and isinstance(value, bool)
    if isinstance(value, float) or (value is None and name == "logprob"):
        return isinstance(wrong, int | float)
    if isinstance(value, str):
        return isinstance(wrong, str) and name not in CLOSED and (kind, name) not in CLOSED_IN
    if isinstance(value, list):
        return wrong == [] and path[-2:-1] not in (("top",), ("events",))  # those are tuples of two
    if isinstance(value, dict):
        return (path == ("detail",) and isinstance(wrong, dict)) or (path == ("sampling",) and wrong == {})
    return type(wrong) is type(value)


class TestBytes:
    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\xc1",
            b"{}",
            b"\x90",
            b"\x80",
            b"\x81\x01\x02",
            b"\x91" * 100_000,
            b"\x82\xa4type\xa9release/1\xa8lease_id\xa1\xff",  # no UTF-8
            b"\x82\xa4type\xa9release/1\xa8lease_id" + b"\x91" * 100_000,
            b"\x82\xa4type\xa5pin/1\xa5names\xdd\xff\xff\xff\xff",  # claims four thousand million names
        ],
        ids=repr,
    )
    def test_nonsense(self, data: bytes) -> None:
        with pytest.raises(DecodeError):
            decode(data, Release, Pin)

    @given(st.binary(max_size=200))
    @settings(max_examples=300, deadline=None)
    def test_random_bytes_raise_nothing_else(self, data: bytes) -> None:
        with pytest.raises(DecodeError):
            decode(data, *(type(example) for example in EXAMPLES))

    @given(st.data())
    @settings(max_examples=300, deadline=None)
    def test_a_changed_byte_raises_nothing_else(self, data: st.DataObject) -> None:
        good = encode(data.draw(st.sampled_from(EXAMPLES)))
        at = data.draw(st.integers(0, len(good) - 1))
        bad = good[:at] + bytes([data.draw(st.integers(0, 255))]) + good[at + 1 :]
        with contextlib.suppress(DecodeError):  # another text or number may be as good
            decode(bad, *(type(example) for example in EXAMPLES))

    def test_one_of_several_kinds(self) -> None:
        kinds = Release, DumpRequest
        assert decode(encode(DumpRequest(offset=3)), *kinds) == DumpRequest(offset=3)
        with pytest.raises(DecodeError, match="Release or DumpRequest"):
            decode(encode(Accepted(worker_id="w")), *kinds)

    def test_a_message_of_the_longest_prompt_is_far_below_what_a_server_takes(self) -> None:
        (example,) = (each for each in EXAMPLES if isinstance(each, Generate))
        longest = msgspec.structs.replace(example, prompt=(151_935,) * 131_072)
        assert len(encode(longest)) < 1024 * 1024

    @pytest.mark.parametrize("offset", [2**64, -(2**63) - 1])
    def test_what_cannot_be_sent_is_an_error_of_the_sender(self, offset: int) -> None:
        with pytest.raises(OverflowError):
            encode(DumpRequest(offset=offset))
