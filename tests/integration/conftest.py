"""Fixtures of the tests that run models."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def make_bench() -> Iterator[Callable[..., object]]:
    """Makes `model_steps.Bench`es (same arguments) and closes them after the test."""
    from tests.integration.model_steps import Bench

    benches: list[Bench] = []

    def make(*args: object, **options: object) -> Bench:
        benches.append(Bench(*args, **options))  # type: ignore[arg-type]
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()
