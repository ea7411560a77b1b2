"""Placement: whom it never chooses, what moves it, and that it spreads."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from libs.placement.policy import LongestPrefix
from libs.placement.view import MIN_GAIN_BLOCKS, Prompt, Worker
from libs.wire.messages import Placement, Role, Source

BLOCK = 16
POLICY = LongestPrefix(
    local_prefill_tokens=64, peer_cost=0.05, store_cost=0.1
)  # round numbers, not the defaults


def worker(worker_id: str, role: Role = "decode", **changes: object) -> Worker:
    idle = Worker(worker_id, role, BLOCK, hit_blocks=0, requests=0, queued_tokens=0, blocks_used=0,
                  blocks_total=1000)  # fmt: skip
    return replace(idle, **changes)  # type: ignore[arg-type]


def place(num_tokens: int, *workers: Worker, exclude: tuple[str, ...] = ()) -> Placement:
    placement = POLICY.place(Prompt(num_tokens, frozenset(exclude)), workers)
    assert placement is not None
    return placement


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Prompt, list[Worker]]:
    num_blocks = draw(st.integers(0, 40))
    num_tokens = num_blocks * BLOCK + draw(st.integers(0, BLOCK - 1)) or 1
    ids = [f"w{number}" for number in range(draw(st.integers(0, 6)))]
    workers = [
        Worker(
            worker_id,
            draw(st.sampled_from(["prefill", "decode"])),
            BLOCK,
            hit_blocks=draw(st.integers(0, num_blocks)),
            requests=draw(st.integers(0, 40)),
            queued_tokens=draw(st.integers(0, 3000)),
            blocks_used=draw(st.integers(0, 100)),
            blocks_total=draw(st.sampled_from([10, 100])),
            saturated=draw(st.booleans()),
            draining=draw(st.booleans()),
            last_chosen=draw(st.integers(0, 5)),
        )
        for worker_id in ids
    ]
    exclude = frozenset(draw(st.sets(st.sampled_from(ids))) if ids else ())
    return Prompt(num_tokens, exclude), workers


@given(fleets())
def test_never_chooses_who_must_not_be_chosen(fleet: tuple[Prompt, list[Worker]]) -> None:
    prompt, workers = fleet
    able = {
        role: [w for w in workers if w.role == role and not w.draining and w.worker_id not in prompt.exclude]
        for role in ("prefill", "decode")
    }
    placement = POLICY.place(prompt, workers)
    if placement is None:
        assert not able["decode"]
        return
    chosen = {"decode": placement.decode, "prefill": placement.prefill}
    for role, worker_id in chosen.items():
        if worker_id is None:
            continue
        (picked,) = [w for w in able[role] if w.worker_id == worker_id]
        fitting = [w for w in able[role] if w.fits(prompt)]
        assert picked in fitting or not fitting
        assert not picked.saturated or all(w.saturated for w in (fitting or able[role]))


@given(fleets())
def test_decision_depends_on_no_order(fleet: tuple[Prompt, list[Worker]]) -> None:
    prompt, workers = fleet
    assert POLICY.place(prompt, workers) == POLICY.place(prompt, workers[::-1])


@given(fleets())
def test_local_prefill_only_where_decode_has_most_or_nobody_else_can(
    fleet: tuple[Prompt, list[Worker]],
) -> None:
    prompt, workers = fleet
    placement = POLICY.place(prompt, workers)
    if placement is None:
        return
    (decode,) = [w for w in workers if w.worker_id == placement.decode]
    best = max(w.hit_blocks for w in workers if w.worker_id not in prompt.exclude)
    held = best if best >= decode.hit_blocks + MIN_GAIN_BLOCKS else decode.hit_blocks
    missing = max(1, prompt.num_tokens - held * BLOCK)
    small = missing <= 64 and missing < prompt.num_tokens / 2
    others = [
        w for w in workers if w.role == "prefill" and not w.draining and w.worker_id not in prompt.exclude
    ]
    if placement.prefill is None:
        assert small or not others
    elif small:  # somebody else has the first token sooner, because decode would have to fetch
        known = replace(prompt, peer_blocks=best)
        (prefill,) = [w for w in others if w.worker_id == placement.prefill]
        costs = [POLICY.prefill_cost(known, worker) for worker in (decode, prefill)]
        assert costs[0] > costs[1] and max(best, prompt.store_blocks) > decode.hit_blocks


def test_a_known_prompt_is_read_where_it_stands_and_by_decode_where_that_is_busy() -> None:
    """Decode would fetch 4000 tokens; the prefill worker that holds them has the first token sooner."""
    prompt = Prompt(num_tokens=4000)
    decode = worker("d", "decode", hit_blocks=0)
    holder = worker("p", "prefill", hit_blocks=4000 // BLOCK)
    policy = LongestPrefix(local_prefill_tokens=64)
    placement = policy.place(prompt, [decode, holder])
    assert placement is not None and (placement.prefill, placement.prefill_sources) == ("p", ())
    busy = policy.place(prompt, [decode, replace(holder, queued_tokens=500)])
    assert busy is not None and busy.prefill is None
    assert [source.worker_id for source in busy.decode_sources] == ["p"]
    held = policy.place(prompt, [replace(decode, hit_blocks=4000 // BLOCK), holder])
    assert held is not None and held.prefill is None


@given(fleets(), st.integers(1, 40))
def test_holding_more_never_costs_a_worker_the_prompt(fleet: tuple[Prompt, list[Worker]], more: int) -> None:
    prompt, workers = fleet
    policy = LongestPrefix(local_prefill_tokens=0)
    before = policy.place(prompt, workers)
    if before is None:
        return
    for role, chosen in (("decode", before.decode), ("prefill", before.prefill)):
        warmer = [
            replace(w, hit_blocks=min(w.hit_blocks + more, prompt.num_tokens // BLOCK))
            if w.worker_id == chosen
            else w
            for w in workers
        ]
        after = policy.place(prompt, warmer)
        assert after is not None
        assert getattr(after, role) in (chosen, None)


@given(fleets())
def test_sources_are_worth_the_pull(fleet: tuple[Prompt, list[Worker]]) -> None:
    prompt, workers = fleet
    placement = POLICY.place(prompt, workers)
    if placement is None:
        return
    assert (
        placement.prefill is None or placement.decode_sources == ()
    )  # offers bring the decode worker all blocks
    by_id = {w.worker_id: w for w in workers}
    pulls = {placement.decode: placement.decode_sources, placement.prefill: placement.prefill_sources}
    for chosen, sources in pulls.items():
        for source in sources:
            assert chosen is not None and source.worker_id not in {chosen, *prompt.exclude}
            assert source.num_blocks == by_id[source.worker_id].hit_blocks
            assert source.num_blocks >= by_id[chosen].hit_blocks + MIN_GAIN_BLOCKS


def test_no_decode_worker_is_no_placement() -> None:
    assert POLICY.place(Prompt(100), [worker("p", "prefill")]) is None
    assert POLICY.place(Prompt(100), [worker("d", draining=True)]) is None
    assert POLICY.place(Prompt(100, frozenset({"d"})), [worker("d")]) is None


def test_longest_prefix_wins_prefill_until_its_queue_outweighs_it() -> None:
    warm = worker("p1", "prefill", hit_blocks=50)
    cold = worker("p2", "prefill")
    assert place(1000, worker("d"), warm, cold).prefill == "p1"
    assert place(1000, worker("d"), replace(warm, queued_tokens=30), cold).prefill == "p1"
    moved = place(
        1000, worker("d"), replace(warm, queued_tokens=300), cold
    )  # the other pulls what this one holds
    assert (moved.prefill, moved.prefill_sources) == ("p2", (Source(worker_id="p1", num_blocks=50),))


def test_hit_counts_and_score_are_those_of_the_chosen() -> None:
    placement = place(1000, worker("d", hit_blocks=3), worker("p", "prefill", hit_blocks=50, queued_tokens=7))
    assert (placement.decode_hit_blocks, placement.prefill_hit_blocks, placement.score) == (3, 50, 207.0)
    assert "200 of 1000 tokens" in placement.reason


def test_decode_balances_requests_and_memory_and_credits_a_prefix() -> None:
    assert place(160, worker("d1", requests=2), worker("d2", requests=1)).decode == "d2"
    assert place(160, worker("d1", blocks_used=500), worker("d2", requests=3)).decode == "d2"
    assert place(4000, worker("d1", hit_blocks=200, requests=2), worker("d2")).decode == "d1"
    assert place(4000, worker("d1", hit_blocks=200, requests=9), worker("d2")).decode == "d2"


def test_a_pool_too_small_for_the_prompt_is_passed_over() -> None:
    assert place(1000, worker("d1", blocks_total=62), worker("d2", requests=30)).decode == "d2"


def test_the_shared_head_of_all_chats_draws_nobody() -> None:
    """Each worker that served a chat holds the block of the template; the others must still get their turn."""
    counts: Counter[str] = Counter()
    workers = {
        w.worker_id: w for w in (worker("d1"), worker("d2"), worker("p1", "prefill"), worker("p2", "prefill"))
    }
    for number in range(1, 41):
        placement = place(45, *workers.values())
        for chosen in (placement.decode, placement.prefill):
            assert chosen is not None
            counts[chosen] += 1
            workers[chosen] = replace(workers[chosen], hit_blocks=1, last_chosen=number)
    assert min(counts[each] for each in workers) >= 10, counts


def test_short_suffix_of_a_held_prompt_stays_on_decode() -> None:
    prefill = worker("p", "prefill", hit_blocks=1)
    assert place(1000, worker("d", hit_blocks=60), prefill).prefill is None  # 40 missing
    assert place(1000, worker("d", hit_blocks=58), prefill).prefill == "p"  # 72 missing
    assert place(60, worker("d"), prefill).prefill == "p"  # short, but nothing of it is held
    assert place(33, worker("d", hit_blocks=1), prefill).prefill == "p"  # 17 of 33: more than half


def test_a_fully_held_prompt_still_computes_one_token() -> None:
    placement = place(32, worker("d", hit_blocks=2), worker("p", "prefill"))
    assert placement.prefill is None and "lacks 1 of 32" in placement.reason


def test_sources_prefer_who_stays() -> None:
    cold = worker("d")
    leaving = worker("d1", hit_blocks=50, draining=True)
    staying = worker("p1", "prefill", hit_blocks=49, draining=False)
    everybody = (cold, leaving, staying)
    assert place(1000, *everybody, exclude=("p1",)).decode_sources == (Source(worker_id="d1", num_blocks=50),)
    chosen = place(1000, worker("d", hit_blocks=1), leaving, worker("p0", "prefill"), staying)
    assert chosen.prefill == "p1" and chosen.prefill_sources == ()  # one block more is not worth a pull
    busy = replace(staying, queued_tokens=5000)
    assert place(1000, cold, leaving, worker("p0", "prefill"), busy).prefill_sources == (
        Source(worker_id="p1", num_blocks=49),
    )
    longer = replace(leaving, hit_blocks=51)
    assert place(1000, cold, longer, worker("p0", "prefill"), busy).prefill_sources == (
        Source(worker_id="d1", num_blocks=51),
    )


def test_a_worker_that_failed_the_request_is_not_pulled_from() -> None:
    placement = place(1000, worker("d"), worker("p", "prefill", hit_blocks=60), exclude=("p",))
    assert placement.prefill is None and placement.decode_sources == ()


def test_what_the_store_holds_need_not_be_computed() -> None:
    """So a worker that has nothing is nearly as good as one that has all of it."""
    prompt = Prompt(1600, store_blocks=99)
    busy = worker("p1", "prefill", hit_blocks=99, queued_tokens=400)
    idle = worker("p2", "prefill")
    placement = POLICY.place(prompt, [worker("d", blocks_total=50), busy, idle])
    assert placement is not None
    assert (placement.prefill, placement.store_blocks) in ((None, 99), ("p2", 99))


def test_affinity_holds_while_load_is_even_and_gives_way_when_it_is_not() -> None:
    holder, other = worker("p1", "prefill", hit_blocks=90), worker("p2", "prefill")
    prompt = Prompt(1600)
    for queued, chosen in ((0, "p1"), (50, "p1"), (400, "p2")):
        workers = [worker("d"), replace(holder, queued_tokens=queued), other]
        placement = POLICY.place(prompt, workers)
        assert placement is not None and placement.prefill == chosen, queued


def test_a_known_prompt_stays_with_decode_that_fetches_as_soon_as_prefill_could() -> None:
    for prompt, workers in (
        (Prompt(1600, store_blocks=98), [worker("d"), worker("p", "prefill")]),
        (Prompt(1600), [worker("d"), worker("p", "prefill", hit_blocks=98, queued_tokens=100)]),
        (Prompt(1600), [worker("d"), worker("p", "prefill"), worker("e", hit_blocks=98, requests=9)]),
    ):
        placement = POLICY.place(prompt, workers)
        assert placement is not None and (placement.decode, placement.prefill) == ("d", None)


def test_alternatives_are_told_with_their_costs() -> None:
    workers = [worker("d"), *(worker(f"p{n}", "prefill", queued_tokens=1000 * n) for n in range(6))]
    placement = place(1600, *workers)
    assert placement.prefill == "p0" and placement.score == 1600
    assert [(each.worker_id, each.score) for each in placement.alternatives] == [
        ("p1", 2600), ("p2", 3600), ("p3", 4600),
    ]  # fmt: skip
