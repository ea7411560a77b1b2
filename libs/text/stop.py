"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Iterable

from libs.text.errors import TextError


class StopMatcher:
    """Lets text through up to the first stop string, and holds back only what may still become one.

    The first is the one that is complete first; of those complete at the same character, the longest. So the
    result does not depend on how the text was cut, and no text waits for a stop string that another one has
    already beaten. Each character costs the same, however long the stop strings are.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Raises TextError for an empty stop string."""
        self._stops = [_Progress(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self.matched: str | None = None  # the stop string that was found

    @property
    def stopped(self) -> bool:
        return self.matched is not None

    def push(self, text: str) -> str:
        """Text that may be sent now; once stopped, always ""."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        for index, character in enumerate(text, start=len(self._held) + 1):
            complete = [stop.text for stop in self._stops if stop.advance(character)]
            if complete:
                self.matched = max(complete, key=len)
                self._held = ""
                return pending[: index - len(self.matched)]
        num_sent = len(pending) - max(stop.num_matched for stop in self._stops)
        self._held = pending[num_sent:]
        return pending[:num_sent]

    def flush(self) -> str:
        """What is still held when the text ends without a stop string; "" when called again."""
        held, self._held = self._held, ""
        return held


class _Progress:
    """How much of one stop string the text ends with (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        if not text:
            raise TextError("a stop string must not be empty")
        self.text = text
        self.num_matched = 0
        # _fallback[n]: length of the longest proper beginning of text[:n] that is also its end
        self._fallback = [0, 0]
        for character in text[1:]:
            length = self._fallback[-1]
            while length and text[length] != character:
                length = self._fallback[length]
            self._fallback.append(length + (text[length] == character))

    def advance(self, character: str) -> bool:
        """True if `character` completes the stop string."""
        while self.num_matched and self.text[self.num_matched] != character:
            self.num_matched = self._fallback[self.num_matched]
        self.num_matched += self.text[self.num_matched] == character
        return self.num_matched == len(self.text)
