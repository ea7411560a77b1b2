"""Two hosts and a bad network between them, in every run of the tests; `make chaos` does more."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.chaos.router import why_not

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]


def test_streams_survive_a_bad_network() -> None:
    """In a process of its own, which moves to another network namespace."""
    if reason := why_not():
        pytest.skip(f"two hosts cannot be made here: {reason}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.hosts", "--rounds", "3"],
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
