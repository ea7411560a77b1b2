"""A rolling restart of everything, and workers that come and go, without one failed request."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.rolling import replace_everything

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]


def test_everything_is_replaced_and_no_request_fails(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    answers = replace_everything(tmp_path, seed)
    print(answers, "answers")
    assert answers > 100
