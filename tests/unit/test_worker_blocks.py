"""What peers and coordinators see of a worker's blocks: numbered events, listings, pins; and once-only attempts."""

from __future__ import annotations

import time

import pytest
from opentelemetry.context import Context

from libs.engine.kv.cache import KvCache
from libs.engine.kv.layout import KvLayout
from libs.engine.kv.leases import LeaseTable
from libs.engine.kv.names import block_names, root_name
from libs.engine.sequence import Sequence
from libs.service.bus import Incoming
from libs.wire.errors import Code, RequestRefused
from libs.wire.messages import DumpRequest, Limits, Pin, PoolRef, Release, Sampling
from libs.worker import blocks as worker_blocks
from libs.worker.attempts import Attempts
from libs.worker.blocks import BlockFeed, Pins
from libs.worker.capacity import MIB, kv_blocks

ROOT = root_name("model", "layout", "default")
POOL = PoolRef(worker_id="w", endpoints=("shm://b/x",), epoch=5, layout="layout", key=b"k")
NOBODY = Incoming(subject="s", context=Context(), wants_reply=True)


def filled(kv: KvCache, tokens: list[int], request_id: str = "r") -> Sequence:
    """A sequence whose full blocks are computed and named, still held."""
    seq = Sequence(request_id, ROOT, tokens, len(tokens), Sampling(), Limits(max_tokens=1), deadline_ns=0)
    assert kv.grow(seq, len(tokens))
    seq.num_computed = len(tokens)
    kv.commit(seq)
    return seq


def test_events_are_numbered_without_gap_across_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_blocks, "EVENTS_PER_MESSAGE", 2)
    kv = KvCache(8, 4)
    feed = BlockFeed(kv, "w", epoch=5)
    filled(kv, list(range(20)))
    first = feed.take()
    assert [(m.first_seq, len(m.events)) for m in first] == [(0, 2), (2, 2), (4, 1)]
    assert feed.take() == []
    filled(kv, list(range(100, 108)), "s")
    assert [m.first_seq for m in feed.take()] == [5]


def test_events_that_overflowed_show_as_a_gap() -> None:
    kv = KvCache(8, 4, max_events=3)
    feed = BlockFeed(kv, "w", epoch=5)
    filled(kv, list(range(20)))
    (message,) = feed.take()
    assert (message.first_seq, len(message.events)) == (2, 3)


def test_a_listing_comes_in_pages_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_blocks, "NAMES_PER_PAGE", 2)
    kv = KvCache(16, 4)
    feed = BlockFeed(kv, "w", epoch=5)
    tokens = list(range(20))
    filled(kv, tokens)
    page = feed.dump(DumpRequest())
    filled(kv, list(range(100, 108)), "later")
    names = list(page.names)
    while page.next_offset is not None:
        page = feed.dump(DumpRequest(offset=page.next_offset))
        names += page.names
    assert tuple(names) == block_names(ROOT, tokens, 4)
    assert page.seq == 4


def test_an_empty_pool_lists_nothing_before_its_first_event() -> None:
    dump = BlockFeed(KvCache(4, 4), "w", epoch=5).dump(DumpRequest())
    assert (dump.seq, dump.names, dump.next_offset) == (-1, (), None)


async def test_a_pin_holds_the_known_run_until_it_is_released() -> None:
    kv = KvCache(4, 4)
    leases = LeaseTable(kv)
    pins = Pins(kv, leases, POOL)
    tokens = list(range(8))
    kv.release(filled(kv, tokens))
    names = (*block_names(ROOT, tokens, 4), b"unknown", b"more")
    pinned = await pins.pin(Pin(names=names, layout="layout", lease_s=5), NOBODY)
    assert len(pinned.block_ids) == 2 and kv.used == 2
    other = Sequence("o", ROOT, [9] * 16, 16, Sampling(), Limits(max_tokens=1), deadline_ns=0)
    assert not kv.grow(other, 16), "pinned blocks were given away"
    assert (await pins.release(Release(lease_id=pinned.lease_id), NOBODY)).live
    assert kv.used == 0
    assert not (await pins.release(Release(lease_id=pinned.lease_id), NOBODY)).live


async def test_a_pin_of_nothing_opens_no_lease_and_another_layout_is_refused() -> None:
    kv = KvCache(4, 4)
    leases = LeaseTable(kv)
    pins = Pins(kv, leases, POOL)
    pinned = await pins.pin(Pin(names=(b"unknown",), layout="layout", lease_s=5), NOBODY)
    assert (pinned.block_ids, pinned.lease_id, leases.count) == ((), "", 0)
    with pytest.raises(RequestRefused) as refused:
        await pins.pin(Pin(names=(), layout="other", lease_s=5), NOBODY)
    assert refused.value.code == Code.MODEL_MISMATCH


async def test_nobody_pins_for_ever() -> None:
    kv = KvCache(4, 4)
    leases = LeaseTable(kv)
    kv.release(filled(kv, [1, 2, 3, 4]))
    names = block_names(ROOT, [1, 2, 3, 4], 4)
    await Pins(kv, leases, POOL).pin(Pin(names=names, layout="layout", lease_s=1e9), NOBODY)
    assert leases.reap(time.monotonic() + worker_blocks.MAX_LEASE_S + 1)
    assert kv.used == 0


def test_attempts_begin_once_and_stay_void() -> None:
    attempts = Attempts(capacity=2)
    assert attempts.begin("a", 1)
    assert not attempts.begin("a", 1)
    assert not attempts.begin("a", 0), "a newer attempt has begun"
    assert attempts.begin("a", 2)
    attempts.abort("a", 2)
    attempts.abort("a", 0)  # late, older
    assert attempts.is_void("a", 2) and not attempts.is_void("a", 3)
    for number in range(3):
        attempts.abort(f"other-{number}", 0)
    assert not attempts.is_void("a", 2), "memory is bounded: the oldest is forgotten"


def test_pool_size_follows_the_setting_and_the_machine() -> None:
    layout = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64)
    assert kv_blocks(layout, 1024) == 1024 * MIB // layout.block_bytes
    assert 64 * MIB // layout.block_bytes <= kv_blocks(layout, None) <= 2048 * MIB // layout.block_bytes
    with pytest.raises(ValueError, match="kv_cache_mib=1 holds 2 blocks"):
        kv_blocks(layout, 1)
