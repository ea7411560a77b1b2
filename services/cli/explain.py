"""`baton cache explain`: where a prompt's KV is, and why what is missing is missing.

    own names    the prompt's blocks, named for this model, layout and tenant: asked of the coordinator
    strangers    the same tokens under another model or tenant: looked for in the store's headers

Only who can read the store is told of strangers; no client of the gateway ever is.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
from dataclasses import asdict, dataclass
from typing import Final

from libs.checkpoint.open import open_checkpoint, resolve_model
from libs.engine.kv.names import block_names, root_name
from libs.service import logs
from libs.service.bus import Bus, Incoming
from libs.service.config import Settings
from libs.service.tenant import tenant_of_key
from libs.store.interface import StoreError
from libs.store.key import namespace, tenant_tag
from libs.store.open import open_store
from libs.store.strangers import find_strangers
from libs.text.chat import ChatMessage
from libs.text.model import TextModel
from libs.wire import subjects
from libs.wire.errors import Code, RequestRefused
from libs.wire.messages import Heartbeat
from libs.wire.store_messages import Explain, Explained
from services.cli.health import CONNECT_TIMEOUT_S

_HEARTBEAT_S: Final = 3.0
_ANSWER_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """Counts in tokens. `miss` is about the first token that nobody holds; "" where all that can be cached is."""

    prompt_tokens: int
    cacheable_tokens: int
    workers: dict[str, int]
    store: int
    miss: str

    @property
    def cached_tokens(self) -> int:
        return max([self.store, *self.workers.values()])


def run_explain(arguments: argparse.Namespace, settings: Settings) -> int:
    """Prints who holds what. Raises BatonError where no worker or coordinator answers."""
    logs.configure("explain", "explain", settings, stream=io.StringIO())
    text = arguments.text if arguments.text is not None else sys.stdin.read()
    explanation = asyncio.run(_explain(text, arguments.chat, tenant_of_key(arguments.key), settings))
    if arguments.as_json:
        print(json.dumps({**asdict(explanation), "cached_tokens": explanation.cached_tokens}, indent=2))
    else:
        print("\n".join(lines_of(explanation)))
    return 0


def lines_of(told: Explanation) -> list[str]:
    lines = [f"{told.prompt_tokens} tokens, of which {told.cacheable_tokens} can be cached (full blocks)"]
    lines += [f"  {worker:<24} {tokens:>7} tokens" for worker, tokens in told.workers.items()]
    lines.append(f"  {'store':<24} {told.store:>7} tokens")
    if told.miss:
        lines.append(f"from token {told.cached_tokens} on: {told.miss}")
    return lines


async def _explain(text: str, is_chat: bool, tenant: str, settings: Settings) -> Explanation:
    checkpoint = await asyncio.to_thread(lambda: open_checkpoint(resolve_model(settings.model)))
    tokens = _tokens(TextModel.from_checkpoint(checkpoint), text, is_chat)
    fingerprint = checkpoint.fingerprint(settings.cache_dir / "fingerprints")
    async with await Bus.connect(settings.nats_url, "baton-explain", timeout_s=CONNECT_TIMEOUT_S) as bus:
        beat = await _heartbeat(bus, fingerprint)
        size = beat.block_size
        usable = len(tokens) // size * size
        cacheable = min(usable, len(tokens) - 1)  # the last token is always computed: its logits are wanted
        where = (namespace(fingerprint, beat.layout), tenant_tag(tenant))
        names = block_names(root_name(fingerprint, beat.layout, tenant), tokens[:usable], size)
        answer = await bus.request(subjects.EXPLAIN, Explain(names=names), Explained, timeout_s=_ANSWER_S)
    told = Explanation(
        prompt_tokens=len(tokens),
        cacheable_tokens=cacheable,
        workers={each.worker_id: min(cacheable, each.num_blocks * size) for each in answer.workers},
        store=min(cacheable, answer.store_blocks * size),
        miss=answer.miss,
    )
    if told.miss and not told.cached_tokens:
        return await asyncio.to_thread(_with_strangers, told, tokens, where, settings)
    return told


def _tokens(model: TextModel, text: str, is_chat: bool) -> list[int]:
    if is_chat:
        return list(model.encode_chat([ChatMessage(role="user", content=text)]))
    return list(model.encode_completion(text))


async def _heartbeat(bus: Bus, fingerprint: str) -> Heartbeat:
    """Of a worker that serves this model: it knows the layout. Raises RequestRefused where none is heard."""
    found: asyncio.Future[Heartbeat] = asyncio.get_running_loop().create_future()

    async def hear(beat: Heartbeat, incoming: Incoming) -> None:
        if beat.model_fingerprint == fingerprint and not found.done():
            found.set_result(beat)

    await bus.subscribe(subjects.HEARTBEATS, (Heartbeat,), hear)
    try:
        async with asyncio.timeout(_HEARTBEAT_S):
            return await found
    except TimeoutError:
        text = "no worker serves this model; name the one that runs with --model"
        raise RequestRefused(Code.NO_WORKER, text, retryable=True) from None


def _with_strangers(
    told: Explanation, tokens: list[int], where: tuple[str, str], settings: Settings
) -> Explanation:
    if settings.store_url is None:
        return told
    try:
        store = open_store(settings.store_url)
        try:
            strangers = find_strangers(store, tokens, *where)
        finally:
            store.close()
    except (StoreError, ValueError):
        return told
    if not strangers:
        return told
    return Explanation(
        told.prompt_tokens, told.cacheable_tokens, told.workers, told.store,
        f"{told.miss}; the same beginning is in the store for {', '.join(strangers)}",
    )  # fmt: skip
