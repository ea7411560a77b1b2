"""What a person sees while something takes long: one live line on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

_PLAIN_EVERY_S = 5.0
_SPIN = "|/-\\"


class Progress:
    """Lines that stay (`line`) and one that is overwritten (`wait`)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._shown = False
        self._spin = 0
        self._next_plain = 0.0

    def line(self, text: str) -> None:
        self._clear()
        print(text, file=self._stream, flush=True)

    def wait(self, text: str) -> None:
        """Says what is waited for; call it as often as you like."""
        if self._live:
            self._spin += 1
            width = shutil.get_terminal_size().columns - 1
            shown = f"{_SPIN[self._spin % len(_SPIN)]} {text}"[:width]
            self._stream.write(f"\r\x1b[K{shown}")
            self._stream.flush()
            self._shown = True
        elif time.monotonic() >= self._next_plain:
            self._next_plain = time.monotonic() + _PLAIN_EVERY_S
            print(text, file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._shown = False
