"""A decode worker that goes on with another's answer: the same tokens as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.engine.fake import fake_continuation
from libs.wire.errors import RequestRefused
from libs.wire.messages import Finished
from tests.cluster import cluster
from tests.integration.test_handoff import all_clean, prompt_of
from tests.natsd import nats_url

__all__ = ["nats_url"]


@pytest.mark.parametrize("emitted", [1, 7, 15, 16, 17, 39])
async def test_the_answer_is_the_uninterrupted_one(nats_url: str, tmp_path: Path, emitted: int) -> None:
    prompt = prompt_of(50)
    whole = fake_continuation(prompt, 40)
    async with cluster(nats_url, tmp_path, max_step_tokens=32) as (running, client):
        await running.add("decode", "decode-1")
        answer = await client.ask(
            "rest", prompt, max_tokens=40, prefill=None, emitted=whole[:emitted], deadline_s=30
        )
        assert answer.ids == whole[emitted:]
        assert isinstance(answer.end, Finished)
        assert (answer.end.reason, answer.end.num_tokens) == ("length", 40)
        await all_clean(running)


async def test_a_stop_token_ends_it_where_it_would_have(nats_url: str, tmp_path: Path) -> None:
    prompt = prompt_of(50)
    whole = fake_continuation(prompt, 20)
    async with cluster(nats_url, tmp_path) as (running, client):
        await running.add("decode", "decode-1")
        answer = await client.ask(
            "rest", prompt, max_tokens=20, prefill=None, emitted=whole[:5], stop_token_ids=(whole[9],)
        )
        assert answer.ids == whole[5:10]
        assert isinstance(answer.end, Finished)
        assert (answer.end.reason, answer.end.num_tokens) == ("stop", 10)


@pytest.mark.parametrize(("emitted", "prefill"), [(8, None), (9, None), (3, "prefill-1")])
async def test_what_cannot_be_continued_is_refused(
    nats_url: str, tmp_path: Path, emitted: int, prefill: str | None
) -> None:
    async with cluster(nats_url, tmp_path) as (running, client):
        await running.add("decode", "decode-1")
        with pytest.raises(RequestRefused):
            await client.submit("x", prompt_of(50), max_tokens=8, prefill=prefill, emitted=[1] * emitted)
        await all_clean(running)
