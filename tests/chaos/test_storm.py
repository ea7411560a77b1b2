"""A few rounds of chaos in every run of the tests; `make chaos` does fifty."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.storm import weather

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]


def test_streams_weather_the_storm(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    weather(tmp_path, seed, rounds=5)
