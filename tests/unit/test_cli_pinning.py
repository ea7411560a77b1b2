"""Cores of decode workers are nobody else's."""

from __future__ import annotations

import pytest

from libs.service.config import ConfigError, load
from services.cli.pinning import Pinning, share_cores
from services.cli.plan import make_plan


@pytest.mark.parametrize(
    ("cores", "prefill", "decode", "threads", "rest", "decodes"),
    [
        ([0, 1], 1, 1, None, {0}, [{1}]),
        ([4, 5, 6, 7], 1, 1, None, {4, 5}, [{6, 7}]),
        ([0, 1, 2, 3], 1, 2, 1, {0, 1}, [{2}, {3}]),
        (list(range(8)), 2, 2, None, {0, 1, 2, 3}, [{4, 5}, {6, 7}]),
        ([0, 1, 2, 3], 0, 1, 3, {0}, [{1, 2, 3}]),
    ],
)
def test_shares(
    cores: list[int], prefill: int, decode: int, threads: int | None, rest: set[int], decodes: list[set[int]]
) -> None:
    found = share_cores(cores, prefill=prefill, decode=decode, threads=threads)
    assert found == Pinning(tuple(map(frozenset, decodes)), frozenset(rest))


@pytest.mark.parametrize(("cores", "decode", "threads"), [([0], 1, None), ([0, 1], 2, None), ([0, 1], 1, 2)])
def test_too_few_cores_are_refused_with_what_to_change(
    cores: list[int], decode: int, threads: int | None
) -> None:
    with pytest.raises(ConfigError, match=r"--pin: .*--threads"):
        share_cores(cores, prefill=1, decode=decode, threads=threads)


def test_only_decode_workers_have_cores_in_the_plan() -> None:
    pinning = share_cores([0, 1, 2, 3], prefill=1, decode=2, threads=None)
    plan = make_plan(load({}), {}, prefill=1, decode=2, cores=4, pinning=pinning)
    assert {spec.name: spec.cores for spec in plan.all} == {
        "cache-1": None, "prefill-1": None, "decode-1": {2}, "decode-2": {3}, "gateway-1": None,
    }  # fmt: skip
    assert {spec.env["BATON_THREADS"] for spec in plan.prefill + plan.decode} == {"1"}
