"""Every word the services share: frozen, typed, versioned messages, grouped by who receives them.

The tag of a message carries its version (`generate/1`). A change that an old reader would misunderstand
gets a new number; decoding is strict (`libs.wire.codec`), so an unknown version, an unknown field or a
wrong type is an error that names the field. Token ids travel here; KV bytes never do.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["prefill", "decode"]
FinishReason = Literal["stop", "length"]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of all messages that stand alone on a subject."""


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the typed parts inside messages."""


# ---------------------------------------------------------------- shared parts


class Sampling(Part, frozen=True, kw_only=True):
    """How the next token is drawn. `temperature` 0 is greedy; the generator is keyed by (seed, position)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int = 0  # 0 <= seed < 2**64
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: int | None = None  # None: off; k: the chosen token's and the k best


class Limits(Part, frozen=True, kw_only=True):
    """When a request ends. Stop strings are the gateway's, which alone sees text."""

    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class Source(Part, frozen=True, kw_only=True):
    """A worker that holds the first `num_blocks` named blocks of a prompt."""

    worker_id: str
    num_blocks: int


class Cached(Part, frozen=True, kw_only=True):
    """Prompt tokens that were not computed: all of them, and how many of those came from elsewhere.

    The rest was in the worker's own pool. `miss` says why less came than the placement promised, if so.
    """

    tokens: int
    from_peer: int = 0
    from_store: int = 0
    miss: str = ""


class PoolRef(Part, frozen=True, kw_only=True):
    """Where the bytes of a worker's KV pool can be reached, and which life of that worker is meant."""

    worker_id: str
    endpoints: tuple[str, ...]  # one for each transport, e.g. tcp://10.0.0.7:41873
    epoch: int  # start of the worker's process, ns since 1970; block ids are void in another epoch
    layout: str  # fingerprint of the layout; peers refuse a mismatch
    key: bytes  # proves to the worker that one may pull, and to oneself that it is the worker

    def __repr__(self) -> str:
        return f"PoolRef({self.worker_id}, epoch {self.epoch}, {' '.join(self.endpoints)})"  # without the key


class Token(Part, frozen=True, kw_only=True):
    """One generated token. `top` holds (id, logprob), best first, when logprobs were asked for."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Load(Part, frozen=True, kw_only=True):
    """What a worker is doing now, counted in requests and blocks. free + cached + used == total."""

    waiting: int
    running: int
    blocks_free: int
    blocks_cached: int
    blocks_total: int
    queue_limit: int


# ---------------------------------------------------------------- to decode and prefill workers


class Generate(Message, frozen=True, kw_only=True, tag="generate/2"):
    """Gateway to decode worker: own this request from its first token to its end.

    With `remote_prefill` the worker waits for Offers of the prompt's blocks; without, it computes the
    prompt itself. `attempt` grows when the gateway places the same request again; older attempts are void. Where
    an earlier worker had answered in part, the last `num_emitted` tokens of `prompt` are that part: tokens go on being
    numbered from there, and count towards `limits`.
    """

    request_id: str
    attempt: int
    gateway_id: str
    tenant: str
    prompt: tuple[int, ...]
    sampling: Sampling
    limits: Limits
    remote_prefill: bool
    num_emitted: int = 0
    sources: tuple[Source, ...] = ()
    store_blocks: int = 0  # the store holds the prompt's first blocks, this many
    deadline_ns: int  # ns since 1970
    sent_ns: int


class Prefill(Message, frozen=True, kw_only=True, tag="prefill/2"):
    """Gateway to prefill worker: compute the prompt, offer its blocks to `decode_worker`, sample one token."""

    request_id: str
    attempt: int
    gateway_id: str
    tenant: str
    prompt: tuple[int, ...]
    sampling: Sampling
    limits: Limits
    decode_worker: str
    sources: tuple[Source, ...] = ()
    store_blocks: int = 0  # the store holds the prompt's first blocks, this many
    deadline_ns: int
    sent_ns: int


class Accepted(Message, frozen=True, kw_only=True, tag="accepted/1"):
    """Reply to Generate and Prefill: the worker owns the request now and will end it."""

    worker_id: str


class Refused(Message, frozen=True, kw_only=True, tag="refused/1"):
    """Reply to any request that was not accepted; nothing was kept. `code` is one of `libs.wire.errors.Code`."""

    code: str
    message: str
    retryable: bool
    retry_after_s: float | None = None


class Abort(Message, frozen=True, kw_only=True, tag="abort/1"):
    """Gateway to workers: nobody reads this request any more. Idempotent; may overtake what it aborts."""

    request_id: str
    attempt: int  # this attempt and older ones


class Audit(Message, frozen=True, kw_only=True, tag="audit/1"):
    """Gateway to worker: what do you still owe of these (request id, attempt)? They have been quiet for a while.

    Worker to gateway: do you still wait for these? They have been here for a while.
    """

    attempts: tuple[tuple[str, int], ...]


class Debt(Part, frozen=True, kw_only=True):
    """What is open of one attempt. Not `owed`: there is no such work, done or never heard of; a gateway waits for none.

    Decode workers say how many tokens of the answer they have sent, and whether they wait for a prefill worker's Offer.
    """

    owed: bool
    num_sent: int = 0
    awaits_offer: bool = False


class Audited(Message, frozen=True, kw_only=True, tag="audited/1"):
    """Reply to Audit, in the order that was asked."""

    debts: tuple[Debt, ...]


class FirstToken(Part, frozen=True, kw_only=True):
    """What prefill sampled, with what decode must report: hits, and when computing ended (ns since 1970)."""

    token: Token
    cached: Cached
    computed_ns: int


class Offer(Message, frozen=True, kw_only=True, tag="offer/3"):
    """Holder to puller: blocks `first_block ...` of the request's prompt are whole and pinned by `lease_id`.

        prompt   |0 ......................... num_tokens|........
        blocks   |first_block = 2 -> | 2 | 3 | 4 (part) |

    Offers of one request arrive in order; each begins where the last one's full blocks ended. The final one
    carries the first token and may end in a partly filled block.
    """

    request_id: str
    attempt: int
    pool: PoolRef
    lease_id: str
    first_block: int
    block_ids: tuple[int, ...]
    num_tokens: int
    first: FirstToken | None = None


class OfferFailed(Message, frozen=True, kw_only=True, tag="offer-failed/1"):
    """Holder to puller: no further Offer will come. The puller computes what it lacks."""

    request_id: str
    attempt: int
    code: str
    message: str


class Pin(Message, frozen=True, kw_only=True, tag="pin/1"):
    """Puller to holder: pin the longest run of these named blocks, from the first on, for `lease_s` seconds."""

    names: tuple[bytes, ...]
    layout: str
    lease_s: float


class Pinned(Message, frozen=True, kw_only=True, tag="pinned/2"):
    """Reply to Pin; `block_ids` may be shorter than asked, or empty (then there is no lease to release)."""

    pool: PoolRef
    lease_id: str
    block_ids: tuple[int, ...]


class Release(Message, frozen=True, kw_only=True, tag="release/1"):
    """Puller to holder: done with the lease. Unknown or expired leases are no error."""

    lease_id: str


class Released(Message, frozen=True, kw_only=True, tag="released/1"):
    """Reply to Release. `live`: the lease had held until now, so all bytes copied under it were whole.

    A puller uses what it copied only after this answer: no clock of another machine is trusted.
    """

    live: bool


# ---------------------------------------------------------------- to the gateway


class Delta(Part, frozen=True, kw_only=True, tag="delta", tag_field="kind"):
    """Tokens `seq`, `seq + 1`, ... of a request's answer, counted from 0.

    With token 0 come `cached` (a gateway that ends the request at a stop string sees no Finished) and
    `sent_ns`, when the token left the worker (ns since 1970), for the trace.
    """

    request_id: str
    attempt: int
    seq: int
    tokens: tuple[Token, ...]
    cached: Cached | None = None
    sent_ns: int | None = None


class Finished(Part, frozen=True, kw_only=True, tag="finished", tag_field="kind"):
    """The request's end. `num_tokens` were emitted in all; `cached` of the prompt were not computed."""

    request_id: str
    attempt: int
    reason: FinishReason
    num_tokens: int
    cached: Cached


class Failed(Part, frozen=True, kw_only=True, tag="failed", tag_field="kind"):
    """The request's other end. Retryable: the same request may succeed if it is placed again."""

    request_id: str
    attempt: int
    code: str
    message: str
    retryable: bool


class StepOutput(Message, frozen=True, kw_only=True, tag="step-output/2"):
    """Worker to gateway: all that one engine step produced for this gateway's requests, in one message."""

    worker_id: str
    outputs: tuple[Delta | Finished | Failed, ...]


# ---------------------------------------------------------------- to the cache coordinator


class Route(Message, frozen=True, kw_only=True, tag="route/1"):
    """Gateway to coordinator: where should this prompt go? `names` are its full blocks' names, in order."""

    request_id: str
    names: tuple[bytes, ...]
    num_tokens: int
    exclude: tuple[str, ...] = ()  # workers that just failed this request


class Choice(Part, frozen=True, kw_only=True):
    """A worker that a prompt could have gone to, and its cost in the unit of `Placement.score`."""

    worker_id: str
    score: float


class Placement(Message, frozen=True, kw_only=True, tag="placement/2"):
    """Reply to Route. `prefill` is None when decode computes the prompt itself (short uncached suffix)."""

    decode: str
    prefill: str | None
    decode_sources: tuple[Source, ...] = ()  # peers whose blocks beat the decode worker's own
    prefill_sources: tuple[Source, ...] = ()
    decode_hit_blocks: int
    prefill_hit_blocks: int
    store_blocks: int = 0  # the store holds the first blocks, this many
    miss: str = ""  # why the first block that nobody holds is missing; "": all are there
    reason: str  # one line for the trace: the rule that decided
    score: float
    alternatives: tuple[Choice, ...] = ()  # the next best


class Done(Message, frozen=True, kw_only=True, tag="done/1"):
    """Gateway to coordinator: the request has ended, however; its load no longer counts."""

    request_id: str


class BlockEvent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A named block appeared in a worker's pool (`stored`) or left it."""

    stored: bool
    name: bytes


class BlockEvents(Message, frozen=True, kw_only=True, tag="block-events/1"):
    """Worker to coordinators: events `first_seq`, `first_seq + 1`, ... of this epoch."""

    worker_id: str
    epoch: int
    first_seq: int
    events: tuple[BlockEvent, ...]


class DumpRequest(Message, frozen=True, kw_only=True, tag="dump-request/1"):
    """Coordinator to worker: send the names you hold, from position `offset` of the listing on."""

    offset: int = 0


class Dump(Message, frozen=True, kw_only=True, tag="dump/1"):
    """Reply to DumpRequest: names held after event `seq` of `epoch`. `next_offset` None: this was the last page."""

    worker_id: str
    epoch: int
    seq: int
    names: tuple[bytes, ...]
    next_offset: int | None = None


# ---------------------------------------------------------------- to whoever watches


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat/1"):
    """Worker to everybody, each `heartbeat_s` seconds and at once when it starts, drains or stops."""

    worker_id: str
    role: Role
    epoch: int
    model: str  # served name
    model_fingerprint: str
    layout: str
    context_length: int
    block_size: int
    load: Load
    state: Literal["serving", "draining", "stopped"]


class StatusRequest(Message, frozen=True, kw_only=True, tag="status-request/1"):
    """`baton status` to every process."""


class ServiceStatus(Message, frozen=True, kw_only=True, tag="service-status/1"):
    """Reply to StatusRequest, from a process of any kind."""

    service: Literal["gateway", "prefill", "decode", "cache"]
    instance_id: str
    host: str
    pid: int
    started_ns: int
    state: str
    model: str | None = None
    address: str | None = None  # gateway: where it listens
    load: Load | None = None  # workers
    inflight: int | None = None  # gateway: requests it owns
    detail: dict[str, str | int | float] = {}
