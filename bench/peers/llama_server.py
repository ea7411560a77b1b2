"""The first token of a cached prompt, as llama-server gives it."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libs.bench.shapes import Cached
from libs.wire.errors import BatonError

_START_TIMEOUT_S, _ANSWER_TIMEOUT_S, _STOP_TIMEOUT_S = 60.0, 600.0, 10.0
_TOKEN_IDS = (1000, 20000)  # ordinary tokens of any vocabulary; below are control tokens
_MOST_RECOMPUTED = 1  # tokens of the cached part that llama-server may compute again


@dataclass(frozen=True, slots=True)
class Answer:
    """`first_token_ms` as the server measured it (`timings.prompt_ms`), `wall_ms` at the client."""

    first_token_ms: float
    wall_ms: float
    num_computed: int


def cached_first_token(server: Path, model: Path, threads: int, shape: Cached, repeats: int) -> list[Answer]:
    """Sends a prompt, then `repeats` times the same with other tokens at its end. A new server for each call.

    Raises BatonError where the server fails, or computes more than the end: then the cache was not used.
    """
    rng = random.Random(0)
    prompt = _tokens(rng, shape.cached)
    with serving(server, model, threads, shape.cached + shape.new) as url:
        ask(url, prompt)
        ask(url, prompt + _tokens(rng, shape.new))  # the first of its kind is not timed
        answers = [ask(url, prompt + _tokens(rng, shape.new)) for _ in range(repeats)]
    for answer in answers:
        if answer.num_computed > shape.new + _MOST_RECOMPUTED:
            raise BatonError(f"llama-server computed {answer.num_computed} tokens of a cached prompt")
    return answers


def ask(url: str, prompt: list[int]) -> Answer:
    """One token for a prompt given as token ids. Raises BatonError where there is no answer."""
    body = {"prompt": prompt, "n_predict": 1, "cache_prompt": True, "temperature": 0.0, "id_slot": 0}
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begin = time.perf_counter()
    try:
        with _open(request, _ANSWER_TIMEOUT_S) as response:
            document = json.load(response)
    except (OSError, ValueError) as error:
        raise BatonError(f"llama-server did not answer: {error}") from error
    return parse_answer(document, 1e3 * (time.perf_counter() - begin))


def parse_answer(document: dict[str, Any], wall_ms: float) -> Answer:
    """Raises BatonError for an answer without timings."""
    try:
        timings = document["timings"]
        return Answer(float(timings["prompt_ms"]), wall_ms, int(timings["prompt_n"]))
    except (KeyError, TypeError, ValueError) as error:
        raise BatonError(f"llama-server's answer has no timings: {error!r}") from error


@contextmanager
def serving(server: Path, model: Path, threads: int, num_tokens: int, slots: int = 1) -> Iterator[str]:
    """A server with room for `num_tokens` in all, stopped at the end whatever happens."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        server, "-m", model, "-t", threads, "-fa", "on", "-np", slots, "-c", num_tokens + 256,
        "--host", "127.0.0.1", "--port", port, "--offline",
    ]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_until_ready(process, url, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Any) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            last = log.read().decode(errors="replace").strip().splitlines()[-3:]
            raise BatonError(f"llama-server ended with {process.returncode}: {' / '.join(last)}")
        try:
            with _open(f"{url}/health", 1.0):
                return
        except OSError:  # not listening yet, or 503 while it loads
            time.sleep(0.1)
    raise BatonError(f"llama-server was not ready within {_START_TIMEOUT_S:.0f} s")


def _open(request: str | urllib.request.Request, timeout_s: float) -> Any:
    """Past any proxy: the server is on this machine."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(request, timeout=timeout_s)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(*_TOKEN_IDS) for _ in range(count)]
