"""What every transport keeps, whatever the other side does."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from libs.engine.kv.layout import KvLayout
from libs.engine.kv.pool import KvPool
from libs.transfer.interface import Link, TransferError
from libs.transfer.links import Links
from libs.transfer.nixl_agent import missing
from libs.transfer.transports import TRANSPORTS
from libs.wire.messages import PoolRef
from tests.transfer_holder import LAYOUT, WIDE, Holder, HolderProcess, filled

NUM_WIDE = 256  # blocks of 512 KiB: more than any socket buffers


@pytest.fixture(params=sorted(TRANSPORTS))
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl" and (reason := missing()):
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
async def holder(transport: str, tmp_path: Path) -> AsyncIterator[Holder]:
    holder = Holder(transport, tmp_path)
    await holder.exporter.start()
    yield holder
    await holder.close()


@pytest.fixture
def own() -> Iterator[KvPool]:
    pool = KvPool(LAYOUT, 8)
    yield pool
    pool.close()


@pytest.fixture
async def links(transport: str, own: KvPool) -> AsyncIterator[Links]:
    links = Links(own, (TRANSPORTS[transport],))
    yield links
    await links.close()


@pytest.fixture
def wide() -> Iterator[KvPool]:
    pool = KvPool(WIDE, NUM_WIDE)
    yield pool
    pool.close()


@pytest.fixture
def elsewhere(transport: str, tmp_path: Path) -> Iterator[HolderProcess]:
    process = HolderProcess(transport, tmp_path, NUM_WIDE)
    yield process
    process.close()


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def connect(transport: str, ref: PoolRef, own: KvPool, timeout_s: float = 10.0) -> Link:
    return TRANSPORTS[transport].connect(ref.endpoints[0], ref.key, own, timeout_s)


def changed(ref: PoolRef, **changes: object) -> PoolRef:
    return msgspec.structs.replace(ref, **changes)


def contents(pool: KvPool) -> list[bytes]:
    return [bytes(pool.blocks(block, 1)) for block in range(pool.num_blocks)]


@pytest.mark.parametrize(
    "copies",
    [
        [],
        [(3, 0)],
        [(3, 0), (4, 1), (7, 5), (0, 6)],
        [(n, n) for n in range(8)],
        [(7 - n, n) for n in range(8)],
        [(2, n) for n in range(8)],
    ],
)
async def test_each_block_goes_to_its_place_and_nothing_else_changes(
    holder: Holder, links: Links, own: KvPool, copies: list[tuple[int, int]]
) -> None:
    await links.pull(holder.ref, copies, timeout_s=10)
    expected = [bytes(LAYOUT.block_bytes)] * 8
    for theirs, ours in copies:
        expected[ours] = filled(theirs, LAYOUT)
    assert contents(own) == expected


async def test_what_was_written_after_connecting_is_seen(holder: Holder, links: Links, own: KvPool) -> None:
    await links.pull(holder.ref, [(1, 1)], timeout_s=10)
    holder.pool.blocks(1, 1)[:] = b"\xee" * LAYOUT.block_bytes
    await links.pull(holder.ref, [(1, 2)], timeout_s=10)
    assert contents(own)[2] == b"\xee" * LAYOUT.block_bytes


@pytest.mark.parametrize("copies", [[(8, 0)], [(7, 0), (8, 1)], [(-1, 0)], [(1 << 31, 0)]])
async def test_a_block_that_the_holder_lacks_is_an_error_and_the_next_pull_works(
    holder: Holder, links: Links, own: KvPool, copies: list[tuple[int, int]]
) -> None:
    with pytest.raises(TransferError, match="no block"):
        await links.pull(holder.ref, copies, timeout_s=10)
    await links.pull(holder.ref, [(2, 2)], timeout_s=10)
    assert contents(own)[2] == filled(2, LAYOUT)


async def test_another_layout_is_refused_before_a_byte_moves(
    holder: Holder, links: Links, own: KvPool, transport: str, tmp_path: Path
) -> None:
    with pytest.raises(TransferError, match="KV layout"):
        await links.pull(changed(holder.ref, layout="other"), [(1, 1)], timeout_s=10)
    other = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=8)  # as many bytes
    foreign = Holder(transport, tmp_path, "prefill-2", layout=other)
    await foreign.exporter.start()
    with pytest.raises(TransferError, match="KV layout"):
        await links.pull(changed(foreign.ref, layout=LAYOUT.fingerprint), [(1, 1)], timeout_s=10)
    await foreign.close()
    assert contents(own) == [bytes(LAYOUT.block_bytes)] * 8


async def test_a_former_life_is_refused_and_the_present_one_works(
    holder: Holder, links: Links, own: KvPool, transport: str, tmp_path: Path
) -> None:
    with pytest.raises(TransferError, match="gone"):
        await links.pull(changed(holder.ref, epoch=6), [(1, 1)], timeout_s=10)
    await links.pull(holder.ref, [(1, 1)], timeout_s=10)
    await holder.close()
    reborn = Holder(transport, tmp_path, epoch=8, key=b"n" * 32)
    await reborn.exporter.start()
    await links.pull(reborn.ref, [(2, 2)], timeout_s=10)
    with pytest.raises(TransferError, match="restarted"):
        await links.pull(holder.ref, [(3, 3)], timeout_s=10)
    await reborn.close()
    assert [n for n, data in enumerate(contents(own)) if any(data)] == [1, 2]


async def test_a_holder_that_is_gone_is_an_error(holder: Holder, links: Links) -> None:
    await holder.exporter.close()
    with pytest.raises(TransferError, match="no way to the pool of prefill-1"):
        await links.pull(holder.ref, [(1, 1)], timeout_s=10)


def test_a_holder_killed_in_the_middle_is_an_error_or_all_is_there(
    transport: str, elsewhere: HolderProcess, wide: KvPool
) -> None:
    """Memory that is mapped outlives its maker: there the copy goes through, and only the lease tells."""
    link = connect(transport, elsewhere.ref, wide)
    threading.Timer(0.005, elsewhere.send, [signal.SIGKILL]).start()
    copies = [(n, n) for n in range(NUM_WIDE)]
    try:
        for _ in range(20):
            link.pull(copies, soon())
            assert contents(wide) == [filled(n, WIDE) for n in range(NUM_WIDE)]
            wide.view[:] = bytes(wide.num_bytes)
        assert transport == "shm"
    except TransferError:
        assert transport != "shm"
    link.close()


def test_a_stopped_holder_costs_one_deadline(transport: str, elsewhere: HolderProcess, wide: KvPool) -> None:
    link = connect(transport, elsewhere.ref, wide)
    elsewhere.send(signal.SIGSTOP)
    began = time.monotonic()
    try:
        link.pull([(n, n) for n in range(NUM_WIDE)], time.monotonic() + 0.5)
        assert transport == "shm", "its bytes cannot have come"
    except TransferError:
        assert transport != "shm" and time.monotonic() - began < 10
        after = bytes(wide.view)
        elsewhere.send(signal.SIGCONT)
        time.sleep(0.3)
        assert bytes(wide.view) == after, "written to after the pull had returned"
    link.close()


def test_nobody_connects_to_a_stopped_holder_for_longer_than_the_timeout(
    transport: str, elsewhere: HolderProcess, wide: KvPool
) -> None:
    elsewhere.send(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(TransferError):
        connect(transport, elsewhere.ref, wide, timeout_s=0.3)
    assert time.monotonic() - began < 10


def test_a_deadline_that_has_passed_copies_nothing(
    transport: str, elsewhere: HolderProcess, wide: KvPool
) -> None:
    link = connect(transport, elsewhere.ref, wide)
    with pytest.raises(TransferError):
        link.pull([(1, 1)], time.monotonic() - 1)
    assert not any(bytes(wide.blocks(1, 1)))
    link.close()


def test_abort_ends_a_pull_and_nothing_is_written_later(
    transport: str, elsewhere: HolderProcess, wide: KvPool
) -> None:
    link = connect(transport, elsewhere.ref, wide)
    if transport != "shm":
        elsewhere.send(signal.SIGSTOP)  # or it might be through before the abort
    aborter = threading.Timer(0.02, lambda: (link.abort(), link.abort()))
    aborter.start()
    try:
        while True:  # ends with the abort
            link.pull([(n, n) for n in range(NUM_WIDE)], soon(20))
            assert aborter.is_alive() or transport == "shm"
            if not aborter.is_alive():
                break  # it came between two pulls
    except TransferError:
        pass
    aborter.join()
    after = bytes(wide.view)
    elsewhere.send(signal.SIGCONT)
    time.sleep(0.2)
    assert bytes(wide.view) == after
    link.close()
    link.close()
    link.abort()
    with pytest.raises(TransferError, match="closed"):
        link.pull([(1, 1)], soon())


async def test_a_cancelled_caller_leaves_only_when_nobody_writes_any_more(
    transport: str, elsewhere: HolderProcess, wide: KvPool
) -> None:
    links = Links(wide, (TRANSPORTS[transport],))
    copies = [(n, n) for n in range(NUM_WIDE)]
    await links.pull(elsewhere.ref, copies[:1], timeout_s=10)
    for delay_s in (0.0, 0.001, 0.01):
        task = asyncio.create_task(links.pull(elsewhere.ref, copies, timeout_s=10))
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is None
        wide.view[:] = bytes(wide.num_bytes)
        await asyncio.sleep(0.05)
        assert not any(bytes(wide.view)), "written to after the caller had left"
    await links.pull(elsewhere.ref, copies, timeout_s=10)
    assert contents(wide)[-1] == filled(NUM_WIDE - 1, WIDE)
    await links.close()


async def test_a_stopped_peer_holds_up_nobody_else(
    transport: str, elsewhere: HolderProcess, wide: KvPool, tmp_path: Path
) -> None:
    other = Holder(transport, tmp_path, "prefill-2", layout=WIDE)
    await other.exporter.start()
    links = Links(wide, (TRANSPORTS[transport],))
    elsewhere.send(signal.SIGSTOP)
    stuck = asyncio.create_task(links.pull(elsewhere.ref, [(0, 0)], timeout_s=60))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(links.pull(other.ref, [(3, 1)], timeout_s=10), 20)
    assert not stuck.done() and contents(wide)[1] == filled(3, WIDE)
    elsewhere.send(signal.SIGKILL)
    with pytest.raises(TransferError):
        await stuck
    await links.close()
    await other.close()


async def test_many_pulls_at_once_all_get_theirs(holder: Holder, transport: str) -> None:
    pools = [KvPool(LAYOUT, 8) for _ in range(12)]
    many = [Links(pool, (TRANSPORTS[transport],)) for pool in pools]
    await asyncio.gather(
        *(
            each.pull(holder.ref, [((n + k) % 8, k)], timeout_s=20)
            for n, each in enumerate(many)
            for k in range(8)
        )
    )
    for n, pool in enumerate(pools):
        assert contents(pool) == [filled((n + k) % 8, LAYOUT) for k in range(8)]
    for each, pool in zip(many, pools, strict=True):
        await each.close()
        pool.close()


async def test_no_descriptor_and_no_thread_is_left(transport: str, tmp_path: Path) -> None:
    for epoch in range(6):
        holder, own = Holder(transport, tmp_path, epoch=epoch), KvPool(LAYOUT, 8)
        links = Links(own, (TRANSPORTS[transport],))
        await holder.exporter.start()
        await links.pull(holder.ref, [(1, 1)], timeout_s=10)
        await links.close()
        await holder.close()
        await holder.exporter.close()
        own.close()
        if epoch == 1:  # the loop's own threads and descriptors are there by now
            before = left_over()
    assert left_over() <= before


async def test_an_idle_link_is_given_back_and_made_again(holder: Holder, links: Links, own: KvPool) -> None:
    await links.pull(holder.ref, [(1, 1)], timeout_s=10)
    await links.close_idle(time.monotonic())
    assert "prefill-1" in links.describe()
    await links.close_idle(time.monotonic() + 1e6)
    assert links.describe() == ""
    await links.pull(holder.ref, [(2, 2)], timeout_s=10)
    assert contents(own)[2] == filled(2, LAYOUT)


def left_over() -> tuple[int, int]:
    deadline = soon(5)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("kv-")]
    while threads and time.monotonic() < deadline:  # those that end by themselves
        time.sleep(0.01)
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("kv-")]
    return len(threads), len(list(Path("/proc/self/fd").iterdir()))
