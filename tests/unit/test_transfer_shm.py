"""Pulling blocks through shared memory: right bytes, refused mismatches, dead and silent holders."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libs.engine.kv.layout import KvLayout
from libs.engine.kv.pool import KvPool
from libs.transfer.interface import PoolInfo, TransferError
from libs.transfer.links import Links
from libs.transfer.shm import ShmExporter, runs
from libs.wire.messages import PoolRef

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4)


class Holder:
    """A pool whose block i is filled with the byte i, exported."""

    def __init__(self, directory: Path, worker_id: str = "prefill-1", epoch: int = 7) -> None:
        self.pool = KvPool(LAYOUT, 8)
        for block in range(8):
            self.pool.blocks(block, 1)[:] = bytes([block]) * LAYOUT.block_bytes
        info = PoolInfo(worker_id, epoch, LAYOUT.fingerprint, 8, self.pool.num_bytes)
        self.exporter = ShmExporter(self.pool, info, directory / f"{worker_id}.sock")
        self.ref = PoolRef(
            worker_id=worker_id, endpoint=self.exporter.endpoint, epoch=epoch, layout=LAYOUT.fingerprint
        )


@pytest.fixture
async def holder(tmp_path: Path) -> AsyncIterator[Holder]:
    holder = Holder(tmp_path)
    await holder.exporter.start()
    yield holder
    await holder.exporter.close()
    holder.pool.close()


@pytest.fixture
async def links() -> AsyncIterator[Links]:
    own = KvPool(LAYOUT, 8)
    links = Links(own)
    links.own = own  # type: ignore[attr-defined]
    yield links
    await links.close()


def filled(links: Links, block: int) -> bytes:
    return bytes(links.own.blocks(block, 1))  # type: ignore[attr-defined]


async def test_pull_copies_each_block_to_its_place_and_no_other(holder: Holder, links: Links) -> None:
    await links.pull(holder.ref, [(3, 0), (4, 1), (7, 5), (0, 6)], timeout_s=2)
    size = LAYOUT.block_bytes
    expected = {0: 3, 1: 4, 5: 7, 6: 0}
    for block in range(8):
        assert filled(links, block) == bytes([expected.get(block, 0)]) * size


async def test_bytes_written_after_connecting_are_seen(holder: Holder, links: Links) -> None:
    await links.pull(holder.ref, [(1, 1)], timeout_s=2)
    holder.pool.blocks(1, 1)[:] = b"\xee" * LAYOUT.block_bytes
    await links.pull(holder.ref, [(1, 2)], timeout_s=2)
    assert filled(links, 2) == b"\xee" * LAYOUT.block_bytes


async def test_another_layout_is_refused_before_a_byte_moves(holder: Holder, links: Links) -> None:
    with pytest.raises(TransferError, match="KV layout"):
        await links.pull(replace_ref(holder.ref, layout="other"), [(1, 1)], timeout_s=2)
    assert filled(links, 1) == bytes(LAYOUT.block_bytes)


async def test_a_restarted_holder_is_refused_and_its_new_epoch_works(
    holder: Holder, links: Links, tmp_path: Path
) -> None:
    await links.pull(holder.ref, [(1, 1)], timeout_s=2)
    await holder.exporter.close()
    reborn = Holder(tmp_path, epoch=8)
    await reborn.exporter.start()
    await links.pull(reborn.ref, [(2, 2)], timeout_s=2)
    with pytest.raises(TransferError, match="restarted"):
        await links.pull(holder.ref, [(3, 3)], timeout_s=2)
    await reborn.exporter.close()


async def test_a_holder_that_is_gone_is_an_error(holder: Holder, links: Links) -> None:
    await holder.exporter.close()
    with pytest.raises(TransferError, match="cannot map"):
        await links.pull(holder.ref, [(1, 1)], timeout_s=2)


async def test_a_holder_that_says_nothing_costs_one_deadline(links: Links, tmp_path: Path) -> None:
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    silent.bind(str(tmp_path / "silent.sock"))
    silent.listen()
    ref = PoolRef(worker_id="w", endpoint=f"shm://{tmp_path}/silent.sock", epoch=1, layout=LAYOUT.fingerprint)
    with pytest.raises(TransferError, match="timed out"):
        await asyncio.wait_for(links.pull(ref, [(0, 0)], timeout_s=0.2), timeout=10)
    silent.close()


async def test_an_unknown_block_and_an_unknown_scheme_are_errors(holder: Holder, links: Links) -> None:
    with pytest.raises(TransferError, match="no block"):
        await links.pull(holder.ref, [(8, 0)], timeout_s=2)
    with pytest.raises(TransferError, match="'warp'"):
        await links.pull(replace_ref(holder.ref, worker_id="x", endpoint="warp://y"), [(0, 0)], timeout_s=2)


async def test_cancelling_returns_only_when_the_copy_is_over(holder: Holder, links: Links) -> None:
    entered, leave, left = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        leave.wait(5)
        left.set()

    task = asyncio.create_task(links._run(slow))
    await asyncio.to_thread(entered.wait, 5)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done(), "the caller would free blocks that a thread still writes"
    leave.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left.is_set()


async def test_no_descriptor_is_left_over(tmp_path: Path) -> None:
    before = num_open_files()
    for epoch in range(5):
        holder, own = Holder(tmp_path, epoch=epoch), KvPool(LAYOUT, 8)
        links = Links(own)
        await holder.exporter.start()
        await links.pull(holder.ref, [(1, 1)], timeout_s=2)
        await links.close()
        await holder.exporter.close()
        holder.pool.close()
        own.close()
    assert num_open_files() <= before


def test_runs_joins_what_is_consecutive_on_both_sides() -> None:
    assert runs([(3, 0), (4, 1), (5, 3), (6, 4), (2, 5)]) == [(3, 0, 2), (5, 3, 2), (2, 5, 1)]
    assert runs([]) == []


def replace_ref(ref: PoolRef, **changes: str) -> PoolRef:
    fields = {name: getattr(ref, name) for name in ("worker_id", "endpoint", "epoch", "layout")}
    return PoolRef(**{**fields, **changes})


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
