"""Subjects: ids that cannot break out of them, and no two that mean different things alike."""

from __future__ import annotations

import pytest

from libs.wire import subjects


@pytest.mark.parametrize("id", ["decode-1", "a", "A_b-9", "x" * 64])
def test_good_ids(id: str) -> None:
    assert subjects.check_id(id) == id


@pytest.mark.parametrize(
    "id", ["", "a.b", "a b", "*", ">", "a>", "x" * 65, "a\n", "a\r\nPUB x", "größe", "a/b", "\x00"]
)
def test_bad_ids(id: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        subjects.check_id(id)


def test_no_two_subjects_overlap() -> None:
    """Also with ids that look like parts of other subjects."""
    ids = ("submit", "abort", "offer", "prefill", "decode", "worker", "status", "route", "done")
    made = [subjects.ROUTE, subjects.DONE, subjects.ABORT_ALL, subjects.STATUS, subjects.EXPLAIN]
    made += [subjects.STORE_OFFER, subjects.STORE_LOCATE, subjects.STORE_CHANGED]
    made += [subjects.submit_any("prefill"), subjects.submit_any("decode")]
    for id in ids:
        made += [subjects.audit("prefill", id), subjects.audit("decode", id), subjects.audit("gateway", id)]
        made += [subjects.submit("prefill", id), subjects.submit("decode", id), subjects.outputs(id)]
        made += [
            subjects.heartbeat("prefill", id),
            subjects.heartbeat("decode", id),
            subjects.block_events(id),
        ]
        made += [
            make(id)
            for make in (
                subjects.abort,
                subjects.offer,
                subjects.pin,
                subjects.release,
                subjects.dump,
            )
        ]
    assert len(set(made)) == len(made)


def matches(pattern: str, subject: str) -> bool:
    wanted, found = pattern.split("."), subject.split(".")
    return len(wanted) == len(found) and all(w in ("*", f) for w, f in zip(wanted, found, strict=True))


def test_wildcards_take_what_they_are_for_and_nothing_else() -> None:
    heartbeats = [subjects.heartbeat("prefill", "w"), subjects.heartbeat("decode", "w")]
    others = [subjects.outputs("w"), subjects.abort("w"), subjects.STATUS, subjects.submit("decode", "w")]
    events = subjects.block_events("w")
    assert all(matches(subjects.HEARTBEATS, each) for each in heartbeats)
    assert not any(matches(subjects.HEARTBEATS, each) for each in [*others, events])
    assert matches(subjects.BLOCK_EVENTS, events)
    assert not any(matches(subjects.BLOCK_EVENTS, each) for each in [*others, *heartbeats])
