"""Which processes `baton up` runs, with which environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.service.config import Settings, load
from services.cli.plan import make_plan, worker_threads


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load({}, state_dir=tmp_path, nats_url="nats://127.0.0.1:5000", port=8123)


def test_one_of_each_by_default(settings: Settings) -> None:
    plan = make_plan(settings, {}, prefill=1, decode=1, cores=2)
    assert [spec.name for spec in plan.all] == ["cache-1", "prefill-1", "decode-1", "gateway-1"]


def test_ids_are_unique_and_carry_the_suffix(settings: Settings) -> None:
    plan = make_plan(settings, {}, prefill=2, decode=3, cores=8, suffix="-host-7")
    names = [spec.name for spec in plan.all]
    assert len(set(names)) == 7
    assert all(name.endswith("-host-7") for name in names)


def test_every_process_is_stopped_once_and_the_gateway_first(settings: Settings) -> None:
    plan = make_plan(settings, {}, prefill=2, decode=2, cores=8)
    stopped = [spec.name for stage in plan.stop_stages for spec in stage]
    assert stopped == ["gateway-1", "prefill-1", "prefill-2", "decode-1", "decode-2", "cache-1"]
    assert sorted(stopped) == sorted(spec.name for spec in plan.all)


def test_a_process_reads_back_the_settings_it_was_given(settings: Settings) -> None:
    environ = {"PATH": "/bin", "BATON_PORT": "1", "BATON_INSTANCE_ID": "other"}
    for spec in make_plan(settings, environ, prefill=1, decode=1, cores=8).all:
        seen = load(spec.env)
        assert seen.instance_id == spec.name
        assert (seen.port, seen.nats_url, seen.threads) == (8123, "nats://127.0.0.1:5000", 4)
        assert spec.env["PATH"] == "/bin"
        assert spec.argv[-1] == spec.name.split("-")[0]


def test_workers_get_their_share_of_threads_and_the_user_s_arithmetic(settings: Settings) -> None:
    plan = make_plan(settings, {"MKL_CBWR": "COMPATIBLE"}, prefill=1, decode=1, cores=8)
    for spec in plan.prefill + plan.decode:
        assert (spec.env["OMP_NUM_THREADS"], spec.env["MKL_CBWR"]) == ("4", "COMPATIBLE")


@pytest.mark.parametrize(
    ("cores", "workers", "threads"),
    [(1, 2, 1), (2, 2, 2), (2, 4, 2), (4, 2, 2), (8, 3, 2), (3, 8, 1), (64, 2, 32)],
)
def test_threads_are_shared_above_two_cores(cores: int, workers: int, threads: int) -> None:
    assert worker_threads(cores, workers) == threads


def test_chosen_threads_are_kept(settings: Settings) -> None:
    plan = make_plan(load({}, threads=5), {}, prefill=1, decode=1, cores=64)
    assert plan.decode[0].env["BATON_THREADS"] == "5"
