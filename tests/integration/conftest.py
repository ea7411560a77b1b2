"""Fixtures of the tests that run models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.model_steps import MakeRunner


@pytest.fixture(params=["torch", "native"])
def make_runner(request: pytest.FixtureRequest) -> MakeRunner:
    """Of a test that both engines must pass; the native one with weights of every format."""
    from tests.integration.model_steps import MIXED_FORMATS, native_runner, torch_runner

    if request.param == "torch":
        return torch_runner
    return functools.partial(native_runner, formats=MIXED_FORMATS)


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
