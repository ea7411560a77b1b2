"""`baton chat`: a conversation in the terminal, over the gateway's own HTTP interface."""

from __future__ import annotations

import contextlib
import http.client
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from libs.service.config import Settings
from services.cli import running

_CONNECT_TIMEOUT_S = 5.0
_TOKEN_TIMEOUT_S = 600.0  # a long prompt on a small machine
_PROMPT = "> "
_HELP = "Type a message. /new starts over, /exit ends, Ctrl-C stops an answer."


T = TypeVar("T")


class ChatError(Exception):
    """The gateway refused, failed, or is not there; the message is for people."""


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = _Delta()


class _Error(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    """One server-sent event of an answer, or the body of an error."""

    choices: list[_Choice] = []
    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(slots=True)
class Conversation:
    """The messages so far, and where they go."""

    url: str
    model: str
    key: str = ""  # an API key; "" where none is needed
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> Generator[str, None, None]:
        """Yields the answer piece by piece; question and answer are kept only if the answer came to an end.

        Raises ChatError. Closing the iterator early closes the connection, which makes the gateway abort.
        """
        question = {"role": "user", "content": text}
        body: dict[str, object] = {"model": self.model, "messages": [*self.messages, question]}
        pieces: list[str] = []
        for piece in _stream(self.url, self.key, body):
            pieces.append(piece)
            yield piece
        self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]


def run_chat(settings: Settings, url: str | None, once: str | None, key: str = "") -> int:
    """One answer with `once`, else a conversation until /exit or the end of input."""
    url = (url or _find(settings)).rstrip("/")
    try:
        conversation = Conversation(url, _first_model(url, key), key)
        if once is not None:
            _print_answer(conversation, once)
            return 0
        _talk(conversation)
    except ChatError as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1
    return 0


def _talk(conversation: Conversation) -> None:
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and history for input()
        print(f"{conversation.model} at {conversation.url}. {_HELP}")
    while True:
        try:
            text = input(_PROMPT if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            continue
        if text == "/exit":
            return
        if text == "/new":
            conversation.messages.clear()
        elif text.startswith("/"):
            print(_HELP)
        elif text:
            try:
                _print_answer(conversation, text)
            except KeyboardInterrupt:
                print(" (stopped)")
            except ChatError as error:
                print(f"baton: {error}", file=sys.stderr)


def _print_answer(conversation: Conversation, text: str) -> None:
    with contextlib.closing(conversation.ask(text)) as pieces:
        for piece in pieces:
            print(piece, end="", flush=True)
    print()


def _find(settings: Settings) -> str:
    live = running.find(settings.state_dir)
    if live is not None and live.address is not None:
        return live.address
    return f"http://{settings.host}:{settings.port}"


def _first_model(url: str, key: str) -> str:
    with _request(url, key, "GET", "/v1/models", None, _CONNECT_TIMEOUT_S) as response:
        models = _parse(response.read(), _Models)
    if not models.data:
        raise ChatError(f"{url} serves no model yet")
    return models.data[0].id


def _stream(url: str, key: str, body: dict[str, object]) -> Iterator[str]:
    """The text pieces of a streamed chat completion."""
    body = body | {"stream": True}
    with _request(url, key, "POST", "/v1/chat/completions", body, _TOKEN_TIMEOUT_S) as response:
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            event = _parse(data, _Event)
            if event.error is not None:
                raise ChatError(event.error.message)
            for choice in event.choices:
                if choice.delta.content:
                    yield choice.delta.content
    raise ChatError("the connection ended before the answer did")


@contextlib.contextmanager
def _request(
    url: str, key: str, method: str, path: str, body: dict[str, object] | None, timeout_s: float
) -> Iterator[http.client.HTTPResponse]:
    """An answer with status 200. Raises ChatError for any other, and when the connection fails."""
    connection, prefix = _connection(url, timeout_s)
    try:
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection.request(method, prefix + path, data, headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            error = _parse(response.read(), _Event).error
            raise ChatError(f"HTTP {response.status}: {error.message if error else response.reason}")
        yield response
    except (OSError, http.client.HTTPException) as error:
        raise ChatError(f"no answer from {url} ({error}); is `baton up` running?") from None
    finally:
        connection.close()


def _connection(url: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
    """Not yet open; with the path that `url` begins with."""
    parts = urlsplit(url)
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    try:
        return kinds[parts.scheme](parts.hostname or "", parts.port, timeout=timeout_s), parts.path
    except (KeyError, ValueError, http.client.InvalidURL):
        raise ChatError(f"{url!r} is not an http:// or https:// address") from None


def _parse(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError:
        raise ChatError(f"unexpected answer: {data.decode(errors='replace')[:200]}") from None
