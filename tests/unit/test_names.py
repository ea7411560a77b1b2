"""Names of blocks: the same in every process and on every machine, different for everything that matters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.kv.names import NAME_BYTES, block_names, child_name, root_name

ROOT = root_name("m", "l", "default")
GOLDEN_ROOT = "4fb2f1fef7f27a131ae509ceef0272bafb0bb557724fa9208ef3db09893eba7f"
GOLDEN_NAMES = [
    "e124168c4360e35b1eecb10c03a940cdca172f6441a00f11bd15f6d92da2d3a4",
    "33bf485fbacc5315aafa5a87f8441e319a9c710ab2085677c215c76e6a5978d8",
]
PRINT_NAMES = """
from libs.engine.kv.names import block_names, root_name
root = root_name("m", "l", "default")
print(root.hex(), *(name.hex() for name in block_names(root, list(range(40)), 16)))
"""


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_other_processes_give_the_golden_names(hash_seed: str) -> None:
    repository = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(repository)}
    done = subprocess.run(
        [sys.executable, "-c", PRINT_NAMES],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [GOLDEN_ROOT, *GOLDEN_NAMES]


def test_this_process_gives_the_golden_names() -> None:
    assert ROOT.hex() == GOLDEN_ROOT
    assert [name.hex() for name in block_names(ROOT, tuple(range(40)), 16)] == GOLDEN_NAMES


def test_a_root_depends_on_model_layout_and_tenant() -> None:
    roots = {
        root_name(*parts) for parts in [("m", "l", "t"), ("n", "l", "t"), ("m", "k", "t"), ("m", "l", "u")]
    }
    assert len(roots) == 4


def test_parts_do_not_run_into_each_other() -> None:
    assert root_name("ab", "c", "d") != root_name("a", "bc", "d") != root_name("a", "b", "cd")
    assert root_name("", "a", "") != root_name("a", "", "") != root_name("", "", "a")


def test_only_full_blocks_have_names() -> None:
    assert block_names(ROOT, [], 4) == ()
    assert block_names(ROOT, [1, 2, 3], 4) == ()
    assert len(block_names(ROOT, [1, 2, 3, 4], 4)) == 1
    assert len(block_names(ROOT, [1, 2, 3, 4, 5], 4)) == 1


def test_token_ids_have_four_bytes_and_no_more() -> None:
    assert len(child_name(ROOT, [0, 2**32 - 1])) == NAME_BYTES
    assert child_name(ROOT, [1, 0]) != child_name(ROOT, [2**24, 0]) != child_name(ROOT, [0, 1])
    for wrong in (2**32, -1):
        with pytest.raises(OverflowError):
            child_name(ROOT, [wrong])


@given(
    prefix=st.lists(st.integers(0, 9), max_size=30),
    left=st.lists(st.integers(0, 9), max_size=30),
    right=st.lists(st.integers(0, 9), max_size=30),
    block_size=st.integers(1, 5),
)
def test_names_agree_exactly_as_far_as_the_tokens_do(
    prefix: list[int], left: list[int], right: list[int], block_size: int
) -> None:
    one, two = prefix + left, prefix + right
    for index, (a, b) in enumerate(
        zip(block_names(ROOT, one, block_size), block_names(ROOT, two, block_size), strict=False)
    ):
        end = (index + 1) * block_size
        assert (a == b) == (one[:end] == two[:end])
