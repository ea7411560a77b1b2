"""SmolLM2-135M while processes die: the stream goes on, with exactly the text it would have had."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.running import Baton

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

TOKENS = 160


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baton]:
    running = Baton(tmp_path_factory.mktemp("kill"))
    yield running
    assert running.stop() == 0, "".join(running.output)


class Stream(threading.Thread):
    """Reads one stream; `num_chunks` so far, the whole at the end."""

    def __init__(self, baton: Baton, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps({**body, "model": baton.model(), **options}).encode()
        self._request = urllib.request.Request(
            f"{baton.url}/v1/completions", data, {"content-type": "application/json"}
        )
        self.num_chunks = 0
        self.text = ""
        self.num_tokens: int | None = None  # as the server counts them
        self.last: Any = None
        self.start()

    def run(self) -> None:
        with urllib.request.urlopen(self._request, timeout=120) as response:
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                self.last = line[6:].strip()
                if self.last.startswith(b"{"):
                    event = json.loads(self.last)
                    assert "error" not in event, event
                    self.text += "".join(choice["text"] for choice in event["choices"])
                    self.num_chunks += 1
                    if event.get("usage"):
                        self.num_tokens = event["usage"]["completion_tokens"]

    def until_chunk(self, number: int) -> None:
        deadline = time.monotonic() + 60
        while self.num_chunks < number:
            assert self.is_alive() and time.monotonic() < deadline, "the stream ended, or does not begin"
            time.sleep(0.005)

    def whole(self) -> str:
        self.join(120)
        assert not self.is_alive() and self.last == b"[DONE]", (self.text, self.last)
        return self.text


def body(**fields: Any) -> dict[str, Any]:
    return {
        "prompt": "Once upon a time",
        "max_tokens": TOKENS,
        "temperature": 0.9,
        "seed": 7,
        "ignore_eos": True,
        **fields,
    }


def pid_of(baton: Baton, service: str) -> int:
    (pid,) = (status["pid"] for status in baton.json("status") if status["service"] == service)
    return int(pid)


@pytest.mark.parametrize("service", ["decode", "prefill", "cache"])
def test_a_stream_outlives_the_death_of(baton: Baton, service: str) -> None:
    expected = Stream(baton, body()).whole()
    victim = pid_of(baton, service)
    stream = Stream(baton, body())
    stream.until_chunk(20)
    os.kill(victim, signal.SIGKILL)
    assert stream.whole() == expected
    deadline = time.monotonic() + 60  # the process is started again, for the next test and to end well
    while True:
        found = [status for status in baton.json("status") if status["service"] == service]
        if any(status["pid"] != victim and status["state"] == "serving" for status in found):
            break
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    baton.until_idle(10)


def test_limits_stop_strings_and_penalties_go_on_where_they_were(baton: Baton) -> None:
    whole = Stream(baton, body(frequency_penalty=0.8, presence_penalty=0.3)).whole()
    stop = whole[len(whole) * 2 // 3 :][:12]
    fields = {"frequency_penalty": 0.8, "presence_penalty": 0.3, "stop": stop}
    expected = Stream(baton, body(**fields)).whole()
    stream = Stream(baton, body(**fields))
    stream.until_chunk(20)
    os.kill(pid_of(baton, "decode"), signal.SIGKILL)
    assert stream.whole() == expected


def test_seven_of_twenty_tokens(baton: Baton) -> None:
    """Row 46: the limit counts the whole answer, and a stop string may lie across the cut."""
    request = {"prompt": "The baton is", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    whole = Stream(baton, request)
    text = whole.whole()
    assert whole.num_tokens == 20
    for extra in ({}, {"stop": text[len(text) // 4 : len(text) // 2]}):
        expected = Stream(baton, {**request, **extra}).whole()
        victim = pid_of(baton, "decode")
        stream = Stream(baton, {**request, **extra})
        stream.until_chunk(1 if extra else 7)
        os.kill(victim, signal.SIGKILL)
        assert stream.whole() == expected
        assert extra or stream.num_tokens == 20
        deadline = time.monotonic() + 60
        while not any(
            each["service"] == "decode" and each["state"] == "serving" for each in baton.json("status")
        ):
            assert time.monotonic() < deadline, "no decode worker"
            time.sleep(0.2)
