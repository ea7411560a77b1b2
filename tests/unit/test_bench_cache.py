"""`baton bench cache`: traces that are small enough to be counted by hand, through the whole replay."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from libs.bench.cache import replay
from libs.bench.cache.arrivals import arrivals
from libs.bench.cache.infinite import InfiniteCache
from libs.bench.cache.naming import BlockNames
from libs.bench.cache.options import ReplayOptions
from libs.bench.cache.pool import NodePool
from libs.bench.cache.reading import read_trace
from libs.bench.cache.result import tokens
from libs.bench.cache.trace import Session, Trace, TraceError, count, head, to_runs
from libs.placement.index import BlockIndex
from services.cli.main import build_parser, main
from tests.store_chains import chain

Document = dict[str, Any]


def turn(t: float, num_tokens: int, *runs: tuple[int, int], out: int = 0, busy: float = 1.0) -> Document:
    return {"t": t, "in": num_tokens, "out": out, "hash_ids": [list(run) for run in runs], "api_time": busy}


def coding(folder: Path, *sessions: list[Document], block_size: int = 64) -> Path:
    path = folder / "sessions.jsonl.gz"
    with gzip.open(path, "wt") as lines:
        for number, requests in enumerate(sessions):
            session = {"id": f"session {number}", "block_size": block_size, "requests": requests}
            lines.write(json.dumps(session) + "\n")
    return path


def mooncake(folder: Path, *requests: tuple[int, int, list[int]]) -> Path:
    path = folder / "conversation.jsonl"
    keys = ("timestamp", "input_length", "hash_ids")
    path.write_text(
        "".join(
            json.dumps({**dict(zip(keys, each, strict=True)), "output_length": 50}) + "\n"
            for each in requests
        )
    )
    return path


def options(trace: Path, **more: Any) -> ReplayOptions:
    return ReplayOptions(**{"trace": trace, "capacities": (1_000_000,), **more})


LONG = [turn(0, 64_000, (1, 1000)), turn(10, 74_000, (1, 1150)), turn(20, 90_000, (1, 1150), (1201, 250))]
GROWING = [turn(0, 640, (1, 10)), turn(10, 1290, (1, 20)), turn(20, 1930, (1, 20), (31, 10))]


# ------------------------------------------------------------ traces


def test_a_coding_trace_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    agent = {"t": 5.0, "requests": [turn(0, 128, (50, 2)), turn(20, 192, (50, 3), busy=9.0)]}
    trace = read_trace(coding(tmp_path, [turn(0, 70, (1, 1)), agent, turn(10, 140, (1, 2))]))
    (session,) = trace.sessions
    assert [(each.at_s, each.num_tokens) for each in session.requests] == [
        (0, 70),
        (5, 128),
        (10, 140),
        (25, 192),
    ]
    assert session.length_s == 34
    assert (trace.block_size, trace.num_requests, trace.num_tokens) == (64, 4, 530)


def test_a_session_is_cut_at_its_first_long_input(tmp_path: Path) -> None:
    long = turn(5, 131_073, (1, 2048))
    trace = read_trace(
        coding(
            tmp_path,
            [turn(0, 131_072, (1, 2048)), turn(1, 64, (1, 1)), long, turn(9, 64, (1, 1))],
            [turn(0, 64, (1, 1)), {"t": 1.0, "requests": [long, turn(9, 64, (1, 1))]}, turn(3, 64, (1, 1))],
            [turn(0, 64, (1, 1)), long],  # only one is left
        )
    )
    assert [[each.at_s for each in session.requests] for session in trace.sessions] == [[0, 1], [0, 3]]


def test_an_answer_is_published_as_far_as_the_next_prompt_goes_on(tmp_path: Path) -> None:
    requests = [
        turn(0, 640, (1, 10), out=200),  # 840 tokens: 13 blocks
        turn(1, 1290, (1, 20), out=9_999),  # more than the next prompt shows
        turn(2, 1930, (1, 20), (31, 10), out=640),
        turn(3, 640, (1, 10), out=640),  # went back: its answer is not seen
    ]
    (session,) = read_trace(coding(tmp_path, requests)).sessions
    published = [each.published for each in session.requests]
    assert published == [((1, 13),), ((1, 20), (31, 10)), ((1, 20), (31, 10)), ((1, 10),)]


def test_a_mooncake_trace_has_full_blocks_only(tmp_path: Path) -> None:
    trace = read_trace(mooncake(tmp_path, (0, 1030, [7, 8, 20]), (2500, 512, [7])))
    assert [session.requests[0].blocks for session in trace.sessions] == [((7, 2),), ((7, 1),)]
    assert [session.requests[0].at_s for session in trace.sessions] == [0, 2.5]
    assert trace.has_own_times


@pytest.mark.parametrize("text", ["", "{}\n", "not json\n", '{"timestamp": 0, "input_length": "x"}\n'])
def test_what_is_no_trace_is_told_with_its_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as lines:
        lines.write(text)
    for name in ("a.jsonl", "a.jsonl.gz", "none.jsonl", "none.jsonl.gz"):
        with pytest.raises(TraceError, match=name):
            read_trace(tmp_path / name)


def test_a_gzip_file_that_is_cut_off(tmp_path: Path) -> None:
    path = coding(tmp_path, GROWING)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match="sessions"):
        read_trace(path)


def test_runs() -> None:
    runs = to_runs([1, 2, 3, 7, 8, 2])
    assert runs == ((1, 3), (7, 2), (2, 1))
    assert count(runs) == 6
    assert [head(runs, number) for number in (0, 2, 3, 4)] == [(), ((1, 2),), ((1, 3),), ((1, 3), (7, 1))]
    assert head(runs, 99) == runs


def test_a_slot_takes_the_next_session_when_one_ends(tmp_path: Path) -> None:
    short, long = (
        [turn(0, 64, (1, 1)), turn(3, 64, (1, 1), busy=2)],
        [turn(0, 64, (1, 1)), turn(9, 64, (1, 1))],
    )
    trace = read_trace(coding(tmp_path, short, long, short, short))
    came = [(each.now_s, each.session) for each in arrivals(trace, 2)]
    assert came == [(0, 0), (0, 1), (3, 0), (5, 2), (8, 2), (9, 1), (10, 3), (13, 3)]


def test_requests_with_their_own_times_wait_for_no_slot(tmp_path: Path) -> None:
    trace = read_trace(mooncake(tmp_path, (0, 512, [1]), (10, 512, [2]), (20, 512, [3])))
    assert [each.now_s for each in arrivals(trace, 1)] == [0, 0.01, 0.02]


# ------------------------------------------------------------ parts


def test_equal_names_mean_equal_chains() -> None:
    names = BlockNames()
    long = names.of("a", ((1, 10), (31, 5)))
    assert names.of("a", ((1, 4),)) == long[:4]
    assert names.of("a", ((1, 10), (31, 7)))[:15] == long
    assert set(names.of("b", ((1, 10), (31, 5)))).isdisjoint(long)
    assert names.of("a", ((1, 9), (31, 5)))[9:] != long[10:]  # the same block behind others
    assert BlockNames().of("a", ((1, 10), (31, 5))) == long
    assert len(set(long)) == 15


def test_an_infinite_cache_is_the_obvious_one() -> None:
    rng = random.Random(1)
    infinite, seen = InfiniteCache(), set[bytes]()
    chains = [chain("0", 10)]
    for number in range(200):
        behind = rng.choice(chains)
        names = chain(str(number), rng.randint(0, 5), behind[: rng.randint(0, len(behind))])
        expected = next((at for at, name in enumerate(names) if name not in seen), len(names))
        most = rng.randint(0, 12)
        assert infinite.serve(names, names, most) == min(expected, most)
        seen.update(names)
        chains.append(names)


def test_a_pool_loses_tails_first_and_tells_the_index() -> None:
    index = BlockIndex()
    pool = NodePool("node", 10, index)
    old, new = chain("old", 6), chain("new", 5)
    pool.hold(old)
    assert index.runs(old) == {"node": 6}
    pool.hold(new)
    assert (index.runs(old), index.runs(new), len(pool)) == ({"node": 5}, {"node": 5}, 10)
    pool.hold(old[:2])
    pool.hold(chain("third", 3))
    assert (index.runs(old), index.runs(new)) == ({"node": 2}, {"node": 5})
    pool.hold(chain("huge", 30))
    assert len(pool) == index.count("node") == 10
    assert index.runs(chain("huge", 30)) == {"node": 10}


@pytest.mark.parametrize(("number", "text"), [(16_000_000, "16M"), (250_000, "250K"), (4096, "4096")])
def test_tokens(number: int, text: str) -> None:
    assert tokens(number) == text


# ------------------------------------------------------------ replays


def result_of(path: Path, **more: Any) -> Any:
    (result,) = replay.measure(options(path, **more)).results
    return result


def test_a_growing_conversation_on_one_node(tmp_path: Path) -> None:
    result = result_of(coding(tmp_path, GROWING), nodes=1)
    assert (result.own, result.peer, result.store) == ((10 + 20) * 64, 0, 0)
    assert result.optimum == (10 + 20) * 64
    assert result.uncached == {"node-0": 640 + (1290 - 640) + (1930 - 1280)}
    assert result.total == 640 + 1290 + 1930


def test_the_last_token_is_always_computed(tmp_path: Path) -> None:
    result = result_of(coding(tmp_path, [turn(0, 640, (1, 10)), turn(5, 640, (1, 10))]), nodes=1)
    assert result.own == result.optimum == 9 * 64


def test_what_the_pool_forgot_is_in_the_store(tmp_path: Path) -> None:
    result = result_of(coding(tmp_path, GROWING), nodes=1, pool_tokens=5 * 64)
    assert (result.own, result.store) == (2 * 5 * 64, (5 + 15) * 64)
    assert result.hit_rate == result.optimum_rate


def test_a_store_without_room_forgets(tmp_path: Path) -> None:
    result = result_of(coding(tmp_path, GROWING), nodes=1, pool_tokens=64, capacities=(64,))
    assert (result.own, result.store) == (2 * 64, 0)
    assert result.evicted_objects == 2 + 3 + 4  # each time all that is behind the own pool's block
    assert result.optimum == 30 * 64


def test_a_moved_session_takes_its_blocks_along(tmp_path: Path) -> None:
    path = coding(tmp_path, LONG, LONG, LONG)
    still, moving = result_of(path, nodes=4), result_of(path, nodes=4, move=1.0)
    assert (still.moved_requests, moving.moved_requests) == (0, 6)
    assert still.hit_rate == moving.hit_rate == still.optimum_rate
    assert still.peer + still.store == 0
    assert moving.peer + moving.store > 0


def test_published_answers_are_hits_of_the_next_turn(tmp_path: Path) -> None:
    path = coding(tmp_path, [turn(0, 640, (1, 10), out=200), turn(5, 1290, (1, 20))])
    inputs, outputs = result_of(path, nodes=1), result_of(path, nodes=1, outputs=True)
    assert (inputs.own, inputs.optimum) == (10 * 64, 10 * 64)
    assert (outputs.own, outputs.optimum) == (13 * 64, 13 * 64)


def test_new_sessions_are_spread_over_nodes(tmp_path: Path) -> None:
    result = result_of(coding(tmp_path, *[LONG] * 40), nodes=4, capacities=(16_000_000,))
    assert result.hit_rate == result.optimum_rate
    assert result.imbalance < 1.1


def test_a_prompt_that_all_share_is_one_in_a_mooncake_trace(tmp_path: Path) -> None:
    path = mooncake(tmp_path, *((number * 1000, 1024 + 100, [7, 100 + number]) for number in range(10)))
    result = result_of(path)
    assert result.optimum == 9 * 512
    assert result.own + result.peer + result.store == 9 * 512


def test_a_replay_is_the_same_each_time(tmp_path: Path) -> None:
    rng = random.Random(5)
    sessions = [
        [
            turn(10.0 * at, 64 * size, (1, size))
            for at, size in enumerate(sorted(rng.choices(range(1, 300), k=8)))
        ]
        for _ in range(20)
    ]
    path = coding(tmp_path, *sessions)
    for policy in ("lru", "s3fifo", "cost"):
        small = {
            "policies": (policy,),
            "capacities": (40_000,),
            "pool_tokens": 8_000,
            "nodes": 3,
            "move": 0.3,
        }
        documents = [result_of(path, seed=seed, **small).document() for seed in (1, 1, 2)]
        for document in documents:
            del document["seconds"]
        assert documents[0] == documents[1]
        assert documents[0] != documents[2]
        assert 0 < documents[0]["hit_rate"] < documents[0]["optimum_rate"]
        assert documents[0]["evicted"] > 0


# ------------------------------------------------------------ the command line


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = coding(tmp_path, GROWING)
    arguments = ["bench", "cache", "--trace", str(path), "--capacity", "1K", "--capacity", "2M"]
    assert main([*arguments, "--policy", "all", "--nodes", "2", "--move", "0.5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["requests"], document["sessions"], document["input_tokens"]) == (3, 1, 3860)
    replays: list[Mapping[str, Any]] = document["replays"]
    assert [(each["policy"], each["capacity"]) for each in replays] == [
        (policy, capacity) for policy in ("lru", "s3fifo", "cost") for capacity in (1_000, 2_000_000)
    ]
    for each in replays:
        hits = each["own"] + each["peer"] + each["store"]
        assert each["hit_rate"] == hits / 3860
        assert sum(each["uncached"].values()) == 3860 - hits
        assert each["optimum_rate"] == 1920 / 3860


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cache", "--trace", str(coding(tmp_path, GROWING))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:4] == ["lru", "16M", "49.74", "49.74"] for line in lines)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--trace", "a", "--capacity", "0"),
        ("--trace", "a", "--capacity", "16T"),
        ("--trace", "a", "--nodes", "0"),
        ("--trace", "a", "--move", "1.5"),
        ("--trace", "a", "--move", "nan"),
        ("--trace", "a", "--policy", "random"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(["bench", "cache", *arguments])
    assert capsys.readouterr().out == ""


def test_a_trace_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cache", "--trace", str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl" in capsys.readouterr().err


def test_a_trace_needs_a_session(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="0 sessions"):
        read_trace(coding(tmp_path, [turn(0, 64, (1, 1))]))
    assert Trace("", 64, (Session("", ()),), has_own_times=True).num_requests == 0
