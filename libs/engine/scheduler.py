"""What the next step computes: plans over sequences and blocks. No torch, no clock, no socket.

    add --> waiting --> running --> finished        schedule() -> StepPlan -> (a runner) -> update()
              ^ preempted |

First come, first served. Each step takes one token of every running sequence that lacks only its last one
(decode), then fills what is left of its token budget with chunks of prompts. A sequence is admitted when blocks
for all its tokens are there, so only growing answers can run out of blocks; then the newest sequence gives its
blocks up and is computed again later, mostly from the cache. The oldest is never made to wait by a newer one, so
every sequence ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from libs.engine.kv.cache import KvCache
from libs.engine.plan import Row, StepPlan
from libs.engine.sequence import Sequence, Status
from libs.engine.step import Next, PlanOut, StepEvent, check_drawn
from libs.wire.errors import Code, RequestRefused
from libs.wire.messages import FinishReason, Token


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes of a step and of the queue."""

    max_rows: int = 32  # sequences in one step
    max_step_tokens: int = 512
    max_chunk: int | None = None  # tokens of one prompt in one step; None: max_step_tokens
    max_queue: int = 256  # sequences beyond max_rows; more are refused
    retry_after_s: float = 1.0  # told to those who are refused

    def __post_init__(self) -> None:
        if min(self.max_rows, self.max_step_tokens - 1, self.max_queue, self.chunk) < 1:
            raise ValueError(f"sizes must be above 0, and max_step_tokens above 1: {self}")

    @property
    def max_running(self) -> int:
        """Rows that may all decode, with at least a quarter of a step's tokens left for prompts."""
        return min(self.max_rows, self.max_step_tokens - max(1, self.max_step_tokens // 4))

    @property
    def chunk(self) -> int:
        return self.max_step_tokens if self.max_chunk is None else min(self.max_chunk, self.max_step_tokens)


class Scheduler:
    """Owns all sequences of one engine between `add` and their end."""

    def __init__(self, kv: KvCache, config: SchedulerConfig) -> None:
        self.config = config
        self.num_preemptions = 0
        self._kv = kv
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._running: dict[str, Sequence] = {}  # oldest first, as waiting is
        self._out: list[PlanOut] = []  # plans that are out: the one being executed, and one behind it
        self._ended: list[Sequence] = []  # their blocks are released by reap()
        self._removed: list[
            Sequence
        ] = []  # while a plan holds them: their blocks are released when it has landed
        self._preempted: set[str] = set()
        self._blocked: tuple[str, int] | None = None  # who was not admitted, with how many blocks to spare

    # ------------------------------------------------------------ counts

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_sequences(self) -> int:
        return len(self._waiting) + len(self._running)

    def is_unwanted(self, plan: StepPlan) -> bool:
        """The plan is out, and every sequence in it has ended since."""
        return any(sent.plan is plan and sent.is_unwanted for sent in self._out)

    def next_deadline_ns(self) -> int | None:
        """When `expire` has work next; None without sequences."""
        return min((seq.deadline_ns for seq in self._all()), default=None)

    # ------------------------------------------------------------ arrivals and departures

    def check(self, num_tokens: int, *, num_held: int = 0) -> None:
        """Raises RequestRefused if a sequence of `num_tokens` cannot be taken.

        CAPACITY_EXCEEDED: it could never fit the pool. OVERLOADED: the queue is full, where `num_held` more
        sequences, accepted but not added yet, count as queued.
        """
        if self._kv.blocks_for(num_tokens) > self._kv.total:
            capacity = self._kv.total * self._kv.block_size
            message = f"{num_tokens} tokens do not fit this worker's KV pool of {capacity} tokens"
            raise RequestRefused(Code.CAPACITY_EXCEEDED, message, retryable=False)
        if self.num_sequences + num_held >= self.config.max_running + self.config.max_queue:
            message = f"{self.num_waiting + num_held} requests are waiting, the most this worker takes"
            retry_after_s = self.config.retry_after_s
            raise RequestRefused(Code.OVERLOADED, message, retryable=True, retry_after_s=retry_after_s)

    def add(self, seq: Sequence) -> None:
        """Queues `seq`; KV that it brings along stays its own.

        Raises RequestRefused as `check` does, and ValueError for an id that is here already or a sequence with
        nothing left to compute or to generate.
        """
        if seq.request_id in self._waiting or seq.request_id in self._running:
            raise ValueError(f"sequence {seq.request_id} is here already")
        if seq.num_uncomputed < 1 or seq.num_generated >= seq.limits.max_tokens:
            raise ValueError(f"sequence {seq.request_id} leaves nothing to do")
        self.check(seq.num_tokens)
        seq.status = Status.WAITING
        self._waiting[seq.request_id] = seq

    def reserve(self, seq: Sequence) -> bool:
        """Blocks, and the known prefix, for a sequence that is not added yet because its KV is being pulled.

        All it needs for its present tokens, or nothing: then try again when the cache reports free blocks.
        Nothing is given away that those already here are about to need.
        """
        blocks_for = self._kv.blocks_for
        wanted = sum(
            max(0, blocks_for(each.num_tokens) - len(each.blocks)) for each in self._waiting.values()
        )
        return self._kv.reserve(seq, keep_available=self._watermark() + wanted)

    def remove(self, request_id: str) -> Sequence | None:
        """Ends a sequence early; None if it is not here. Blocks in use by a running step are freed after it."""
        seq = self._waiting.pop(request_id, None) or self._running.pop(request_id, None)
        if seq is not None:
            self._end(seq)
            self._removed.append(seq)
            self._release_removed()
            self._kv.notify()  # one less to keep blocks for, even if it had none
        return seq

    def expire(self, now_ns: int) -> list[Sequence]:
        """Removes and returns the sequences whose deadline has passed."""
        return self._remove([seq for seq in self._all() if seq.deadline_ns <= now_ns])

    def remove_all(self) -> list[Sequence]:
        """Removes and returns every sequence."""
        return self._remove(list(self._all()))

    # ------------------------------------------------------------ steps

    def schedule(self) -> StepPlan | None:
        """The next step, or None: nothing to do, or nothing possible before blocks become free.

        Raises RuntimeError while a plan is out that neither `update` nor `discard` has ended.
        """
        if self._out:
            raise RuntimeError("a plan is being executed")
        self.reap()
        stalled = self._grow_decodes()
        self._admit()
        return self._send(Next.of(s) for s in self._running.values() if s.request_id not in stalled)

    def prepare(self) -> StepPlan | None:
        """The step behind the one that is out, planned before that one's tokens are known.

        None where it cannot be foreseen: sequences wait to be admitted, blocks run out, nothing is left to do, or
        two plans are out already. Then `schedule`, after `update`, finds what to do.
        """
        if len(self._out) != 1:
            return None
        sent = self._out[0]
        following = [Next.of(seq, sent.row_of(seq)) for seq in self._running.values()]
        following = [each for each in following if not each.has_ended]
        if self._waiting and len(following) < self.config.max_running:
            return None
        if not all(self._kv.grow(each.seq, each.num_tokens) for each in following):
            return None
        return self._send(following)

    def _send(self, candidates: Iterable[Next]) -> StepPlan | None:
        """Decodes first, then prompts, as many tokens as a step takes."""
        rows: list[Row] = []
        sequences: dict[str, Sequence] = {}
        budget = self.config.max_step_tokens
        for each in sorted(candidates, key=lambda each: each.num_uncomputed > 1):
            count = min(each.num_uncomputed, self.config.chunk, budget)
            if count == 0:
                break
            rows.append(each.row(count))
            sequences[each.seq.request_id] = each.seq
            budget -= count
        if not rows:
            return None
        plan = StepPlan(tuple(rows))
        self._out.append(PlanOut(plan, sequences))
        return plan

    def update(
        self, plan: StepPlan, drawn: tuple[Token | None, ...], started_ns: int = 0, ended_ns: int = 0
    ) -> list[StepEvent]:
        """Takes in what the runner computed; one event per row whose sequence is still wanted.

        `plan` is the older of those that are out, as it was executed: `resolve` may have taken rows from it.
        Sequences that ended keep their blocks until `reap`. Raises PlanMismatch, with nothing changed, if `drawn`
        does not fit the plan.
        """
        check_drawn(plan, drawn)
        events: list[StepEvent] = []
        sent = self._out.pop(0)
        for row, token in zip(plan.rows, drawn, strict=True):
            seq = sent.sequences[row.request_id]
            if seq.status is Status.FINISHED:  # removed meanwhile
                continue
            seq.num_computed = row.end
            self._kv.commit(seq)
            reason = None if token is None else self._append(seq, token.id)
            tokens = () if token is None else (token,)
            events.append(StepEvent(seq, tokens, reason, None, len(row.tokens), started_ns, ended_ns))
        self._release_removed()
        return events

    def discard(self, plan: StepPlan) -> list[Sequence]:
        """Ends a plan without results; returns the sequences still wanted, which the next plan may hold again."""
        sent = next(sent for sent in self._out if sent.plan is plan)
        self._out.remove(sent)
        self._release_removed()
        return [seq for seq in sent.sequences.values() if seq.status is not Status.FINISHED]

    def reap(self) -> None:
        """Releases the blocks of sequences that have ended and are in no plan that is out."""
        self._ended = self._release(self._ended)

    # ------------------------------------------------------------ inside

    def _release_removed(self) -> None:
        self._removed = self._release(self._removed)

    def _release(self, sequences: list[Sequence]) -> list[Sequence]:
        """Frees the blocks of those that no plan holds; returns the others."""
        flying = [seq for sent in self._out for seq in sent.sequences.values()]
        held = [seq for seq in sequences if any(seq is each for each in flying)]
        for seq in sequences:
            if not any(seq is each for each in held):
                self._kv.release(seq)
        return held

    def _all(self) -> Iterable[Sequence]:
        yield from self._running.values()
        yield from self._waiting.values()

    def _remove(self, sequences: list[Sequence]) -> list[Sequence]:
        for seq in sequences:
            self.remove(seq.request_id)
        return sequences

    def _watermark(self) -> int:
        """Blocks that admission leaves: running answers grow into them, so the admitted are not preempted at once."""
        return len(self._running) + self._kv.total // 100 if self._running else 0

    def _append(self, seq: Sequence, token_id: int) -> FinishReason | None:
        reason = seq.append(token_id)
        if reason is None and self._kv.blocks_for(seq.num_tokens) > self._kv.total:
            reason = "length"  # the pool's end, as the context's
        if reason is not None:
            del self._running[seq.request_id]
            self._end(seq)
            self._ended.append(seq)
        return reason

    def _end(self, seq: Sequence) -> None:
        seq.status = Status.FINISHED
        self._preempted.discard(seq.request_id)

    def _grow_decodes(self) -> set[str]:
        """Gives each decoding sequence room for its next token; returns the ids of those that must wait."""
        stalled: set[str] = set()
        for seq in tuple(self._running.values()):
            while seq.status is Status.RUNNING and not self._kv.grow(seq, seq.num_tokens):
                if not self._take_from_newest(seq):
                    stalled.add(seq.request_id)
                    break
        return stalled

    def _take_from_newest(self, needy: Sequence) -> bool:
        """Releases the blocks of the newest sequence; False if `needy` is that one: it keeps them and waits."""
        for seq in reversed(self._waiting.values()):
            if seq.blocks and seq is not needy:
                self._kv.release(seq)
                self._preempted.add(seq.request_id)
                return True
        newest = next(reversed(self._running.values()), needy)
        if newest is needy:
            return False
        del self._running[newest.request_id]
        self._kv.release(newest)
        newest.status = Status.WAITING
        self._waiting[newest.request_id] = newest
        self._waiting.move_to_end(newest.request_id, last=False)
        self._preempted.add(newest.request_id)
        self.num_preemptions += 1
        return True

    def _admit(self) -> None:
        """Moves waiting sequences to running, in order, as long as rows, tokens and blocks last."""
        budget = self.config.max_step_tokens
        budget -= sum(min(seq.num_uncomputed, self.config.chunk) for seq in self._running.values())
        while self._waiting and len(self._running) < self.config.max_running:
            seq = next(iter(self._waiting.values()))
            if seq.num_uncomputed > 1 and budget <= 0:
                return
            if not self._place(seq):
                if self._running or not self._take_from_newest(seq):
                    return
                continue
            del self._waiting[seq.request_id]
            self._running[seq.request_id] = seq
            seq.status = Status.RUNNING
            budget -= min(seq.num_uncomputed, self.config.chunk)

    def _place(self, seq: Sequence) -> bool:
        """Blocks for all tokens of `seq`; hits that it owes to having been here before are not counted as cached."""
        watermark = self._watermark()
        spare = self._kv.available - watermark
        if self._running and self._blocked is not None:
            request_id, spare_then = self._blocked
            if request_id == seq.request_id and spare <= spare_then:
                return False  # no more than last time: saves hashing a long prompt at every step
        cached = seq.cached
        if not self._kv.reserve(seq, keep_available=watermark):
            self._blocked = (seq.request_id, spare)
            return False
        self._blocked = None
        if seq.request_id in self._preempted:
            seq.cached = cached
        return True
