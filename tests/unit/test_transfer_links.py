"""Which transport a pair of workers takes, what is told of it, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from libs.engine.kv.pool import KvPool
from libs.transfer import links as module
from libs.transfer.interface import TransferError
from libs.transfer.links import Links
from libs.transfer.names import NAMES, parse
from libs.transfer.runs import runs, split
from libs.transfer.transports import TRANSPORTS, address_towards, allowed
from libs.wire.messages import PoolRef
from tests.transfer_holder import LAYOUT, Holder, filled


class Both:
    """One pool's holder by two transports."""

    def __init__(self, directory: Path) -> None:
        self.shm, self.tcp = Holder("shm", directory), Holder("tcp", directory)
        endpoints = self.shm.ref.endpoints + self.tcp.ref.endpoints
        self.ref: PoolRef = msgspec.structs.replace(self.shm.ref, endpoints=endpoints)

    async def start(self) -> None:
        await self.shm.exporter.start()
        await self.tcp.exporter.start()


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[Both]:
    both = Both(tmp_path)
    await both.start()
    yield both
    await both.shm.close()
    await both.tcp.close()


async def pulled_by(both: Both, transports: str, ref: PoolRef | None = None) -> str:
    own = KvPool(LAYOUT, 8)
    links = Links(own, allowed(transports))
    try:
        await links.pull(ref or both.ref, [(3, 3)], timeout_s=10)
        assert bytes(own.blocks(3, 1)) == filled(3, LAYOUT)
        return links.describe()
    finally:
        await links.close()
        own.close()


async def test_the_first_of_the_list_that_both_have_is_taken(both: Both) -> None:
    assert await pulled_by(both, "shm,tcp") == "prefill-1 shm"
    assert await pulled_by(both, "tcp,shm") == "prefill-1 tcp"
    assert await pulled_by(both, "tcp") == "prefill-1 tcp"
    assert await pulled_by(both, "shm,tcp", both.tcp.ref) == "prefill-1 tcp (shm: not exported)"


async def test_another_host_is_known_without_trying(both: Both) -> None:
    far = both.shm.ref.endpoints[0].replace("shm://", "shm://another-boot-")
    ref = msgspec.structs.replace(both.ref, endpoints=(far, *both.tcp.ref.endpoints))
    assert await pulled_by(both, "shm,tcp", ref) == "prefill-1 tcp (shm: on another host)"


async def test_a_fallback_can_be_forbidden(both: Both) -> None:
    await both.shm.exporter.close()
    assert "tcp (shm: its socket" in await pulled_by(both, "shm,tcp")
    with pytest.raises(TransferError, match=r"no way to the pool of prefill-1 \(shm: its socket"):
        await pulled_by(both, "shm")


async def test_what_failed_is_tried_again_later(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("/" + both.shm.ref.endpoints[0].removeprefix("shm://").partition("/")[2])
    await both.shm.exporter.close()
    await asyncio.to_thread(path.touch)  # there, but nobody listens
    own = KvPool(LAYOUT, 8)
    links = Links(own, allowed("shm,tcp"))
    await links.pull(both.ref, [(1, 1)], timeout_s=10)
    assert "prefill-1 tcp (shm: cannot map" in links.describe() and links.num_fallbacks == 1
    await both.shm.exporter.start()
    await links.pull(both.ref, [(2, 2)], timeout_s=10)
    assert "prefill-1 tcp" in links.describe(), "not yet"
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    for peer in links._peers.values():
        peer.retry_at_s = 0.0
    await links.pull(both.ref, [(3, 3)], timeout_s=10)
    assert links.describe() == "prefill-1 shm"
    await links.close()
    own.close()


async def test_a_link_that_broke_is_made_again(both: Both) -> None:
    own = KvPool(LAYOUT, 8)
    links = Links(own, allowed("tcp"))
    await links.pull(both.ref, [(1, 1)], timeout_s=10)
    (peer,) = links._peers.values()
    assert peer.link is not None
    peer.link.abort()
    await links.pull(both.ref, [(2, 2)], timeout_s=10)
    assert bytes(own.blocks(2, 1)) == filled(2, LAYOUT)
    await links.close()
    own.close()


def test_the_key_is_in_no_text(both: Both) -> None:
    assert str(both.ref.key) not in repr(both.ref) and "kkkk" not in repr(both.ref)


def test_names_of_transports() -> None:
    assert set(NAMES) == set(TRANSPORTS) and allowed("tcp, shm,tcp") == (TRANSPORTS["tcp"], TRANSPORTS["shm"])
    for text, match in (("warp", "'warp'"), ("shm,,x", "'x'"), ("", "at least one"), (" , ", "at least one")):
        with pytest.raises(ValueError, match=match):
            parse(text)


def test_the_address_that_reaches_nats() -> None:
    assert address_towards("nats://127.0.0.1:4222") == "127.0.0.1"
    assert address_towards("nats://localhost:4222,nats://other:4222") in ("127.0.0.1", "::1")
    assert address_towards("nats://no-such-host.invalid:4222") == "127.0.0.1"


def test_runs_joins_what_is_consecutive_on_both_sides() -> None:
    assert runs([(3, 0), (4, 1), (5, 3), (6, 4), (2, 5)]) == [(3, 0, 2), (5, 3, 2), (2, 5, 1)]
    assert runs([]) == []
    assert list(split((3, 0, 5), 2)) == [(3, 0, 2), (5, 2, 2), (7, 4, 1)]
