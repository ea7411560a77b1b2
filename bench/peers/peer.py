"""What the comparison asks of an engine, and Baton as one of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench.peers.commands import output_of
from libs.bench.figures import Figure
from libs.bench.shapes import Group
from libs.wire.errors import BatonError

# Values that one visit of a group gives each of its figures: short shapes give more.
REPEATS: Mapping[Group, int] = {"prefill": 1, "decode": 2, "streams": 1, "cached": 3}
_TIMEOUT_S = 1800.0


class Peer(Protocol):
    """An engine on some machine, in processes of its own."""

    @property
    def name(self) -> str: ...

    def visit(self, group: Group, quick: bool) -> list[Figure]:
        """Measures one group of shapes; none where it does not have that group. Raises BatonError."""
        ...


@dataclass(frozen=True, slots=True)
class Baton:
    """Through its command line, as anyone would. `extra` are further flags of `baton bench engine`."""

    model: Path
    threads: int
    extra: tuple[str, ...] = ()
    name: str = field(default="Baton", init=False)

    def visit(self, group: Group, quick: bool) -> list[Figure]:
        """See Peer."""
        return parse_baton(self._run(group, REPEATS[group], quick))

    def engine(self) -> str:
        """Which of Baton's engines this is, and its arithmetic. Raises BatonError where it does not run."""
        return parse_engine(self._run("decode", 1, quick=True))

    def _run(self, group: Group, repeats: int, quick: bool) -> str:
        command = [
            sys.executable, "-m", "services.cli", "bench", "engine", "--json", "--no-limits", "--only", group,
            "--model", self.model, "--threads", self.threads, "--repeats", repeats, *self.extra,
            *(["--quick"] if quick else []),
        ]  # fmt: skip
        return output_of(command, timeout_s=_TIMEOUT_S)


def parse_baton(text: str) -> list[Figure]:
    """The figures in the JSON of `baton bench engine`. Raises BatonError for other text."""
    try:
        return parse_figures(json.loads(text)["figures"])
    except (KeyError, TypeError, ValueError) as error:
        raise BatonError(f"`baton bench engine` printed something else than expected: {error!r}") from error


def parse_figures(documents: Iterable[Mapping[str, Any]]) -> list[Figure]:
    return [Figure.from_json(document) for document in documents]


def parse_engine(text: str) -> str:
    """The engine in the JSON of `baton bench engine`. Raises BatonError for other text."""
    try:
        document = json.loads(text)
        return f"engine {document['engine']}, steps of up to {document['max_step_tokens']} tokens"
    except (KeyError, TypeError, ValueError) as error:
        raise BatonError(f"`baton bench engine` printed something else than expected: {error!r}") from error
