"""What S3Store makes of a service's answers, from a server that answers as it is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from libs.store.interface import ObjectDamaged, ObjectGone, StoreError, StoreFull
from libs.store.s3_store import RETRIES, S3Store
from tests.store_rig import make_chain

CHAIN = make_chain(1, 1)


class Service(ThreadingHTTPServer):
    """Gives `answers` (status, body) in order, the last one for ever."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, bytes]] = []
        self.requests: list[str] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append(f"{self.command} {self.path}")
        answers = self.server.answers
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Tue, 01 Dec 2026 00:00:00 GMT")
        if status == 206:
            self.send_header("Content-Range", f"bytes 0-{len(body) - 1}/{len(body)}")
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_DELETE = do_POST = answer

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with Service() as service:
        thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{service.server_port}")
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        yield service
        service.shutdown()
        thread.join(10)


@pytest.fixture
def store(service: Service) -> S3Store:
    return S3Store("s3://bucket/prefix")


def xml(code: str) -> bytes:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>no</Message></Error>'.encode()


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (507, b"", StoreFull),
        (507, xml("InsufficientStorage"), StoreFull),
        (507, xml("XMinioStorageFull"), StoreFull),
        (403, xml("QuotaExceeded"), StoreFull),
        (403, xml("AccessDenied"), StoreError),
        (401, b"", StoreError),
        (404, xml("NoSuchBucket"), StoreError),
        (500, xml("InternalError"), StoreError),
        (503, xml("SlowDown"), StoreError),
        (400, b"\xff\0not xml", StoreError),
    ],
)
def test_a_write_that_is_refused(
    service: Service, store: S3Store, status: int, body: bytes, kind: type[StoreError]
) -> None:
    service.answers = [(status, body)]
    with pytest.raises(StoreError) as caught:
        CHAIN.write(store)
    assert type(caught.value) is kind
    assert "\n" not in caught.value.message
    assert len(service.requests) <= 1 + RETRIES


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (404, xml("NoSuchKey"), ObjectGone),
        (416, xml("InvalidRange"), ObjectDamaged),
        (206, b"x" * 10, ObjectDamaged),
        (403, xml("AccessDenied"), StoreError),
        (500, b"", StoreError),
        (200, b"x" * 9000, StoreError),  # the whole object where a range was asked for
    ],
)
def test_a_read_that_is_refused(
    service: Service, store: S3Store, status: int, body: bytes, kind: type[StoreError]
) -> None:
    service.answers = [(status, body)]
    with pytest.raises(StoreError) as caught:
        CHAIN.read(store, CHAIN.key)
    assert type(caught.value) is kind


def test_a_hiccup_is_not_noticed(service: Service, store: S3Store) -> None:
    service.answers = [(503, xml("SlowDown")), (200, b"")]
    CHAIN.write(store)
    assert service.requests == [f"PUT /bucket/prefix/{CHAIN.key}"] * 2


def test_one_request_fetches_header_and_blocks(service: Service, store: S3Store) -> None:
    service.answers = [(206, b"?" * 4352)]
    with pytest.raises(ObjectDamaged, match="does not begin"):
        CHAIN.read(store, CHAIN.key)
    assert service.requests == [f"GET /bucket/prefix/{CHAIN.key}"]


@pytest.mark.parametrize("status", [200, 204, 404])
def test_deleting_what_is_not_there_is_no_error(service: Service, store: S3Store, status: int) -> None:
    service.answers = [(status, b"" if status == 204 else xml("NoSuchKey"))]
    store.delete(CHAIN.key)
    assert service.requests == [f"DELETE /bucket/prefix/{CHAIN.key}"]


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_listing_that_is_refused_is_no_empty_store(service: Service, store: S3Store, status: int) -> None:
    service.answers = [(status, xml("NoSuchBucket"))]
    with pytest.raises(StoreError, match="cannot list s3://bucket/prefix"):
        list(store.list())
