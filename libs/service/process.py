"""The frame of a service's process: event loop, signals, exit status."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import NoReturn

import uvloop

from libs.service.logs import get_logger

Main = Callable[[asyncio.Event], Awaitable[int | None]]

_log = get_logger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TEARDOWN_S = 10.0


def run(main: Main) -> NoReturn:
    """Runs `main(stop)` and exits with what it returns (None: 0), or 1 when it raises.

    SIGTERM or SIGINT sets `stop`: `main` should drain and return. A second signal ends the process at once,
    with 128 + the signal's number (143, 130), even where the event loop is stuck.
    """
    # Closing the loop waits for threads of its pool without a limit; one that hangs must not keep us here.
    teardown = threading.Timer(_TEARDOWN_S, _give_up)
    teardown.daemon = True
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                code = runner.run(_supervise(main))
            finally:
                teardown.start()
    except (Exception, asyncio.CancelledError):
        _log.critical("crashed", exc_info=True)
        code = 1
    teardown.cancel()
    sys.stderr.flush()
    raise SystemExit(code)


async def _supervise(main: Main) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    stopping = False

    # Plain signal handlers, not the loop's: those would wait for a loop that is stuck.
    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal stopping
        if stopping:
            os._exit(128 + number)
        stopping = True
        loop.call_soon_threadsafe(stop.set)

    before = {each: signal.signal(each, on_signal) for each in _SIGNALS}
    try:
        return await main(stop) or 0
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _give_up() -> None:
    _log.error("threads did not end; exiting without them", timeout_s=_TEARDOWN_S)
    os._exit(1)
