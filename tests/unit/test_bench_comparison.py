"""Who wins by how much, what is a missed target, and how the table says it."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from bench.peers.compare import bring_in, build_parser, take_turns
from bench.peers.comparison import BATON, Q4_0, Q4_1, VLLM, Comparison
from bench.peers.serving_memory import ServingMemory
from bench.peers.table import markdown
from bench.peers.targets import TARGETS, target_for, verdict
from libs.bench import limits
from libs.bench.figures import Figure
from libs.bench.machine import Machine
from libs.bench.memory import Resident
from libs.bench.shapes import FULL, Group
from libs.bench.work import Share
from libs.wire.errors import BatonError

MACHINE = Machine("Some CPU", 2, ("avx2",), 24.0, "6.1", "3.11.7", {"torch": "2.13.0"})


def comparison(**values: Mapping[str, float]) -> Comparison:
    """`baton={"prefill-512": 400}`; times for keys that begin with `cached`."""
    names = {"baton": BATON, "q4_1": Q4_1, "q4_0": Q4_0, "vllm": VLLM}
    found = Comparison("python -m bench.peers.compare", MACHINE)
    for engine, figures in values.items():
        for key, value in figures.items():
            unit = "ms" if key.startswith("cached") else "tok/s"
            found.add(names[engine], [Figure(key, unit, (value,))])
    return found


def test_targets_are_those_that_were_set() -> None:
    assert {(t.against, t.factor) for t in TARGETS if t.key.startswith("prefill")} == {
        ("q4_1", 4.0), ("best", 2.0), ("machine", 1.2), ("vllm", 1.7)
    }  # fmt: skip
    for shape in FULL.streams:
        assert target_for(shape.key, "q4_1") is not None
        assert target_for(shape.key, "best") is not None
    assert {(t.against, t.factor) for t in TARGETS if t.key == "cached-4000+16"} == {
        ("q4_1", 4.0),
        ("best", 3.0),
    }
    assert len({(t.key, t.against) for t in TARGETS}) == len(TARGETS)
    assert {t.key for t in TARGETS} == {shape.key for shape in FULL.all}


def test_best_is_the_better_of_the_two_on_that_line() -> None:
    found = comparison(
        baton={"prefill-512": 600, "decode-1x32": 100, "cached-4000+16": 100},
        q4_1={"prefill-512": 150, "decode-1x32": 80, "cached-4000+16": 700},
        q4_0={"prefill-512": 300, "decode-1x32": 50, "cached-4000+16": 500},
    )
    assert (found.factor("prefill-512", "q4_1"), found.factor("prefill-512", "best")) == (4.0, 2.0)
    assert (found.factor("decode-1x32", "q4_1"), found.factor("decode-1x32", "best")) == (1.25, 1.25)
    assert (found.factor("cached-4000+16", "q4_1"), found.factor("cached-4000+16", "best")) == (7.0, 5.0)
    assert [(t.key, t.against) for t in found.missed()] == [("decode-1x32", "q4_1")]


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    found = comparison(baton={"prefill-512": 1.0})
    assert found.factor("prefill-512", "q4_1") is None
    assert found.missed() == []
    assert found.verdict("prefill-512", "q4_1") == "not measured (target 4x)"
    assert {target["met"] for target in found.to_json()["targets"]} == {None}


def test_a_verdict_says_what_was_wanted() -> None:
    target = target_for("prefill-512", "best")
    assert verdict(2.0, target) == "2.00x (target 2x)"
    assert verdict(1.994, target) == "**1.99x, missed** (target 2x)"
    assert verdict(1.5, None) == "1.50x"
    assert verdict(None, None) == ""


def test_the_table_shows_misses_and_failures() -> None:
    found = comparison(baton={"prefill-1024": 500}, q4_1={"prefill-1024": 100}, q4_0={"prefill-1024": 400})
    found.shares = {"prefill-1024": Share(least_ms=900, actual_ms=1000)}
    found.memory = {
        "ratio": 1.7,
        "resident_bytes": 2 << 20,
        "weight_bytes": 1 << 20,
        "kv_pool_bytes": 1 << 20,
    }
    found.quality = {
        "engines": {BATON: {"mean": 0.004, "error": 0.001}, Q4_1: {"mean": 0.003, "error": 0.001}}, "met": False
    }  # fmt: skip
    found.failures.append("llama.cpp Q4_0 failed in streams: it died")
    text = markdown(found)
    line = next(line for line in text.splitlines() if line.startswith("| prefill, prompt of 1024 |"))
    assert "500 (500..500)" in line
    assert "5.00x (target 4x)" in line
    assert "**1.25x, missed** (target 2x)" in line
    assert "900 ms / 1000 measured: **0.90x, missed** (target 1.2x)" in text
    assert "**1.70, missed** (target 1.6 at most)" in text
    assert "**no, missed**" in text
    assert (
        "Missed: prefill, prompt of 1024 against best, prefill, prompt of 1024 against machine, resident memory, "
        "quality." in text
    )
    assert "it died" in text
    assert "Some CPU" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[0].count("|") == rows[1].count("|") == rows[2].count("|")


def test_json_has_all_of_it() -> None:
    found = comparison(baton={"prefill-512": 600}, q4_1={"prefill-512": 100})
    document = json.loads(json.dumps(found.to_json()))
    assert document["figures"][BATON][0]["median"] == 600
    met = {(t["key"], t["against"]): t["met"] for t in document["targets"]}
    assert met["prefill-512", "q4_1"] is True
    assert met["prefill-1024", "q4_1"] is None


def test_engines_take_turns_and_one_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.compare.gemm_peak", lambda *_: Figure("gemm-f32", "GFLOP/s", (1.0,)))
    monkeypatch.setattr(
        "bench.peers.compare.read_bandwidth", lambda *_: Figure("read-bandwidth", "GB/s", (1.0,))
    )
    visits: list[tuple[str, Group]] = []

    class Engine:
        def __init__(self, name: str, breaks_in: Group | None = None) -> None:
            self.name = name
            self._breaks_in = breaks_in

        def visit(self, group: Group, quick: bool) -> list[Figure]:
            visits.append((self.name, group))
            if group == self._breaks_in:
                raise BatonError("illegal instruction")
            return [Figure(f"{group}-1", "tok/s", (float(len(visits)),))]

    found = comparison()
    assert (
        len(
            list(
                take_turns(
                    found,
                    [Engine(BATON), Engine(Q4_1, "decode")],
                    ["prefill", "decode"],
                    1,
                    rounds=2,
                    quick=True,
                )
            )
        )
        == 2
    )
    first = [(BATON, "prefill"), (Q4_1, "prefill"), (BATON, "decode"), (Q4_1, "decode")]
    assert visits == [*first, *first[:-1]]
    assert found.figures[BATON]["prefill-1"].values == (1.0, 5.0)
    assert found.figures[Q4_1]["prefill-1"].values == (2.0, 6.0)
    assert found.failures == ["llama.cpp Q4_1 failed in decode: illegal instruction"]
    assert found.limits["gemm-f32"].values == (1.0, 1.0)


def test_figures_of_another_run() -> None:
    found = comparison(baton={"prefill-1024": 710})
    bring_in(found, {VLLM: {"prefill-1024": [355.0]}})
    assert found.factor("prefill-1024", "vllm") == 2.0
    assert "| vLLM-CPU |" in markdown(found)
    assert "brought in from another run" in markdown(found)
    with pytest.raises(BatonError, match="not an engine"):
        bring_in(found, {"vlmm": {}})


def test_memory_counts_full_pools() -> None:
    workers = (Resident(pss_bytes=150, kv_bytes=50), Resident(pss_bytes=120, kv_bytes=0))
    memory = ServingMemory(workers, weight_bytes=100, kv_pool_bytes=200)
    assert memory.resident_bytes == 100 + 120 + 400
    assert memory.ratio == 620 / 500


def test_the_machines_product_is_measured_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_GEMM_TIMEOUT_S", 0.01)
    with pytest.raises(BatonError, match="cannot be measured"):
        limits.gemm_peak(1, 1)


def test_reading_memory_gives_a_value_per_repeat() -> None:
    figure = limits.read_bandwidth(2, 3, num_bytes=4 << 20)
    assert len(figure.values) == 3
    assert min(figure.values) > 0


def test_flags() -> None:
    arguments = build_parser().parse_args(["--only", "prefill", "--rounds", "3", "--build-dir", "/x"])
    assert (arguments.only, arguments.rounds, str(arguments.build_dir)) == (["prefill"], 3, "/x")
    assert not arguments.quick
