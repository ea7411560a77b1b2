"""Spans of one request in the decode worker, recorded when they have ended.

    remote prefill   [handoff][decode.queue][decode.first_step][decode ..............]
                                                               [handoff.kv ..]
    computed here    [decode.queue][kv.pull][decode.queue][prefill.compute][decode.first_step][decode ......]

`handoff` begins where prefill stopped computing. `decode.first_step` ends with the first token on its way; the blocks
that the second token needs may still be on theirs (`handoff.kv`).
"""

from __future__ import annotations

from opentelemetry.context import Context

from libs.engine.sequence import Sequence
from libs.service.telemetry import Telemetry
from libs.wire.messages import Generate

Attributes = dict[str, str | int | float | bool]


class Spans:
    """Times are ns since 1970."""

    def __init__(self, telemetry: Telemetry, context: Context, request: Generate) -> None:
        self._telemetry = telemetry
        self._context = context
        self._attempt = request.attempt
        self._waiting_since_ns = request.sent_ns
        self._computing_since_ns = 0
        self._decoding_since_ns = 0

    def handoff_failed(self, message: str, now_ns: int) -> None:
        if self._decoding_since_ns:  # the first token had come
            self._record("handoff.kv", self._decoding_since_ns, now_ns, {"error.message": message})
            return
        self._record("handoff", self._waiting_since_ns, now_ns, {"error.message": message})
        self._waiting_since_ns = now_ns

    def waited(self, until_ns: int) -> None:
        self._record("decode.queue", self._waiting_since_ns, until_ns, {})

    def waits_from(self, since_ns: int) -> None:
        self._waiting_since_ns = since_ns

    def first_token(self, computed_ns: int, ready_ns: int, now_ns: int) -> None:
        """The first token, computed by prefill at `computed_ns` and here at `ready_ns`, is on its way at `now_ns`."""
        self._record("handoff", computed_ns, ready_ns, {})
        self._record("decode.queue", ready_ns, ready_ns, {})
        self._record("decode.first_step", ready_ns, now_ns, {})
        self._decoding_since_ns = now_ns

    def taken_over(self, now_ns: int, pulled_tokens: int) -> None:
        """All blocks are here and confirmed."""
        self._record("handoff.kv", self._decoding_since_ns, now_ns, {"baton.pulled_tokens": pulled_tokens})

    def step(self, started_ns: int, ended_ns: int, seq: Sequence, *, drew: bool) -> None:
        """An engine step had this sequence in it."""
        if self._decoding_since_ns:
            return
        if not self._computing_since_ns:
            self._computing_since_ns = started_ns
            self.waited(started_ns)
        if drew:
            attributes: Attributes = {
                "baton.prompt_tokens": seq.num_prompt_tokens,
                "baton.cached_tokens": seq.num_cached,
                "baton.cached_from_peer": seq.num_from_peer,
                "baton.cached_from_store": seq.num_from_store,
            }
            self._record("prefill.compute", self._computing_since_ns, ended_ns, attributes)
            self._record("decode.first_step", ended_ns, ended_ns, {})
            self._decoding_since_ns = ended_ns

    def end(self, now_ns: int, num_tokens: int, outcome: str) -> None:
        if self._decoding_since_ns:
            attributes: Attributes = {"baton.tokens": num_tokens, "baton.outcome": str(outcome)}
            self._record("decode", self._decoding_since_ns, max(now_ns, self._decoding_since_ns), attributes)

    def _record(self, name: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        attributes = {"baton.attempt": self._attempt, **attributes}
        self._telemetry.record(name, start_ns, end_ns, self._context, attributes)
