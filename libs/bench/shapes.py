"""What is measured: the shapes of work, with names that Baton's figures and its peers' share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Group = Literal["prefill", "decode", "streams", "cached"]
GROUPS: tuple[Group, ...] = ("prefill", "decode", "streams", "cached")


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt from nothing, to its first token."""

    num_tokens: int

    @property
    def key(self) -> str:
        return f"prefill-{self.num_tokens}"

    @property
    def label(self) -> str:
        return f"prefill, prompt of {self.num_tokens}"


@dataclass(frozen=True, slots=True)
class Decode:
    """`num_streams` sequences together, each with `context` tokens before the first that is timed."""

    num_streams: int
    context: int

    @property
    def key(self) -> str:
        return f"decode-{self.num_streams}x{self.context}"

    @property
    def label(self) -> str:
        streams = "one stream" if self.num_streams == 1 else f"{self.num_streams} streams"
        return f"decode, {streams}, context {self.context}"


@dataclass(frozen=True, slots=True)
class Cached:
    """A prompt whose first `cached` tokens have their KV already, to its first token."""

    cached: int
    new: int

    @property
    def key(self) -> str:
        return f"cached-{self.cached}+{self.new}"

    @property
    def label(self) -> str:
        return f"first token, {self.cached} cached + {self.new} new"


Shape = Prefill | Decode | Cached


@dataclass(frozen=True, slots=True)
class Shapes:
    """What one run measures. `decode_steps` are timed together: one value of a decode figure."""

    prefills: tuple[Prefill, ...]
    decodes: tuple[Decode, ...]
    streams: tuple[Decode, ...]
    cached: tuple[Cached, ...]
    decode_steps: int

    def only(self, groups: frozenset[Group]) -> Shapes:
        """The same without the groups that are not named."""
        return Shapes(
            self.prefills if "prefill" in groups else (),
            self.decodes if "decode" in groups else (),
            self.streams if "streams" in groups else (),
            self.cached if "cached" in groups else (),
            self.decode_steps,
        )

    def fitting(self, context_length: int) -> Shapes:
        """The same without what the model's context cannot hold."""
        steps = self.decode_steps
        return Shapes(
            tuple(shape for shape in self.prefills if shape.num_tokens < context_length),
            tuple(shape for shape in self.decodes if shape.context + steps < context_length),
            tuple(shape for shape in self.streams if shape.context + steps < context_length),
            tuple(shape for shape in self.cached if shape.cached + shape.new < context_length),
            steps,
        )

    @property
    def all(self) -> tuple[Shape, ...]:
        return (*self.prefills, *self.decodes, *self.streams, *self.cached)

    @property
    def num_streams(self) -> int:
        return max((shape.num_streams for shape in (*self.decodes, *self.streams)), default=1)

    @property
    def stream_tokens(self) -> int:
        """Most tokens of a sequence that decodes beside others."""
        return max((shape.context + self.decode_steps for shape in self.streams), default=1)

    @property
    def longest(self) -> int:
        """Most tokens of any sequence."""
        return max(
            self.stream_tokens,
            *(shape.num_tokens for shape in self.prefills),
            *(shape.context + self.decode_steps for shape in self.decodes),
            *(shape.cached + shape.new for shape in self.cached),
            1,
        )


FULL = Shapes(
    prefills=tuple(Prefill(n) for n in (512, 1024, 4096)),
    decodes=tuple(Decode(1, context) for context in (32, 1024, 4096)),
    streams=tuple(Decode(n, context) for n in (16, 32) for context in (128, 1024)),
    cached=(Cached(4000, 16),),
    decode_steps=32,
)
# No key of FULL: a quick figure is never taken for one that a target is about.
QUICK = Shapes(
    prefills=(Prefill(128),),
    decodes=(Decode(1, 64),),
    streams=(Decode(4, 64),),
    cached=(Cached(128, 16),),
    decode_steps=8,
)
LABELS: dict[str, str] = {}
for _plan in (FULL, QUICK):
    LABELS |= {shape.key: shape.label for shape in _plan.all}
