"""A thousand clients that hang up in every phase of a request leave nothing behind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.aborts import PHASES, abort

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_thousand_clients_hang_up(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    phases = abort(tmp_path, seed, count=1000)
    assert all(phases[phase] >= 50 for phase in PHASES), phases
