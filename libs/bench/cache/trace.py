"""Traces of requests, as the replay sees them: which blocks a prompt consists of, and when it comes.

A block is an integer of the trace; equal integers in one scope, behind equal blocks, mean equal tokens. Prompts are
kept as runs of consecutive integers: conversations that grow are few runs, however long they get.
"""

from __future__ import annotations

from dataclasses import dataclass

from libs.wire.errors import BatonError, Code

Runs = tuple[tuple[int, int], ...]  # (first block, how many consecutive ones)


class TraceError(BatonError):
    """The file is no trace that can be replayed."""

    code = Code.BAD_REQUEST


@dataclass(frozen=True, slots=True)
class Request:
    """`at_s`: from the start of its session. `busy_s`: until its answer is complete.

    `blocks`: the full ones of its input. `published`: these and those of its answer, as far as the next prompt
    shows them.
    """

    at_s: float
    busy_s: float
    num_tokens: int
    blocks: Runs
    published: Runs


@dataclass(frozen=True, slots=True)
class Session:
    """Requests in the order in which they come. Sessions of one `scope` share blocks."""

    scope: str
    requests: tuple[Request, ...]

    @property
    def length_s(self) -> float:
        return max(request.at_s + request.busy_s for request in self.requests)


@dataclass(frozen=True, slots=True)
class Trace:
    """`has_own_times`: all sessions start at 0 of one clock. Else they start when others end."""

    name: str
    block_size: int
    sessions: tuple[Session, ...]
    has_own_times: bool

    @property
    def num_requests(self) -> int:
        return sum(len(session.requests) for session in self.sessions)

    @property
    def num_tokens(self) -> int:
        return sum(request.num_tokens for session in self.sessions for request in session.requests)


def to_runs(blocks: list[int]) -> Runs:
    """Consecutive integers as runs."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and sum(runs[-1]) == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return tuple(runs)


def count(runs: Runs) -> int:
    return sum(length for _, length in runs)


def head(runs: Runs, num_blocks: int) -> Runs:
    """The first `num_blocks` of them, or all."""
    taken: list[tuple[int, int]] = []
    for first, length in runs:
        if num_blocks <= 0:
            break
        taken.append((first, min(length, num_blocks)))
        num_blocks -= length
    return tuple(taken)
