"""`baton chat` against a scripted gateway."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from libs.service.config import Settings, load
from services.cli.chat import ChatError, Conversation, run_chat


def event(text: str) -> bytes:
    return (
        b"data: "
        + json.dumps({"id": "x", "choices": [{"index": 0, "delta": {"content": text}}]}).encode()
        + b"\n\n"
    )


ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"


class Gateway(ThreadingHTTPServer):
    """Answers with `answer`, and keeps what it was asked."""

    daemon_threads = True
    status = 200
    answer: bytes = ROLE + event("Hel") + b": a comment\n\n" + event("lo") + USAGE + DONE
    hang = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, object]] = []
        self.client_gone = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        self.reply(200, b'{"object": "list", "data": [{"id": "smol", "object": "model"}]}')

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.reply(self.server.status, self.server.answer)
        if self.server.hang:
            self.wfile.flush()
            self.rfile.read(1)  # returns when the client hangs up
            self.server.client_gone.set()

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load({}, state_dir=tmp_path)


def test_one_answer(gateway: Gateway, settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_chat(settings, gateway.url + "/", "hi") == 0
    assert capsys.readouterr().out == "Hello\n"
    assert gateway.asked == [
        {"model": "smol", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    ]


def test_the_conversation_is_sent_along(gateway: Gateway) -> None:
    conversation = Conversation(gateway.url, "smol")
    assert "".join(conversation.ask("one")) == "Hello"
    assert "".join(conversation.ask("two")) == "Hello"
    assert gateway.asked[1]["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "two"},
    ]


def test_a_stopped_answer_hangs_up_and_is_forgotten(gateway: Gateway) -> None:
    gateway.answer, gateway.hang = ROLE + event("Hel"), True
    conversation = Conversation(gateway.url, "smol")
    pieces = conversation.ask("hi")
    assert next(pieces) == "Hel"
    pieces.close()
    assert gateway.client_gone.wait(10)
    assert conversation.messages == []


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (400, b'{"error": {"message": "messages: too long", "code": "x"}}', "HTTP 400: messages: too long"),
        (502, b"<html>", "unexpected answer: <html>"),
        (503, b"{}", "HTTP 503: Service Unavailable"),
        (200, ROLE + b'data: {"error": {"message": "worker lost"}}\n\n', "worker lost"),
        (200, ROLE + event("Hel"), "ended before the answer did"),
        (200, b"data: {half\n\n", "unexpected answer"),
    ],
)
def test_failures_are_told(
    gateway: Gateway,
    settings: Settings,
    capsys: pytest.CaptureFixture[str],
    status: int,
    answer: bytes,
    message: str,
) -> None:
    gateway.status, gateway.answer = status, answer
    assert run_chat(settings, gateway.url, "hi") == 1
    assert message in capsys.readouterr().err


def test_no_gateway(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_chat(settings, "http://127.0.0.1:1", "hi") == 1
    assert "is `baton up` running?" in capsys.readouterr().err
    assert run_chat(settings, "localhost:8000", "hi") == 1
    assert "not an http:// or https:// address" in capsys.readouterr().err


def test_lines_of_a_pipe_are_questions_until_exit(
    gateway: Gateway, settings: Settings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["one", "", "/new", "two", "/exit", "three"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert run_chat(settings, gateway.url, None) == 0
    assert capsys.readouterr().out == "Hello\nHello\n"
    assert [len(body["messages"]) for body in gateway.asked] == [1, 1]  # type: ignore[arg-type]


def test_control_c_stops_the_answer_and_the_conversation_goes_on(
    gateway: Gateway, settings: Settings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Conversation.ask, 0

    def interrupted(self: Conversation, text: str) -> Iterator[str]:
        nonlocal calls
        calls += 1
        if calls == 1:
            yield "Hel"
            raise KeyboardInterrupt
        yield from real(self, text)

    lines = iter(["one", "two", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    monkeypatch.setattr(Conversation, "ask", interrupted)
    assert run_chat(settings, gateway.url, None) == 0
    assert capsys.readouterr().out == "Hel (stopped)\nHello\n"


def test_an_error_carries_its_message() -> None:
    with pytest.raises(ChatError, match="not an http"):
        list(Conversation("ftp://x", "m").ask("hi"))
