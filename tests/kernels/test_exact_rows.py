"""A row keeps its bits whatever stands beside it, and what measures this can tell when it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from libs.kernels import determinism, environment, matmul
from libs.kernels.activation import silu_mul
from libs.kernels.attention import paged_attention
from libs.kernels.attention_plan import plan_attention
from libs.kernels.environment import mkl_branch
from libs.kernels.kv import LayerKv
from libs.kernels.matmul import Matmul, NativeMatmul, TiledMatmul, choose_matmul
from libs.kernels.norm import rms_norm
from libs.kernels.rope import RopeTable, rope
from libs.kernels.workspace import Workspace

SLICES = [(0, 1), (5, 6), (3, 5), (1, 18), (0, 64), (37, 100)]
HIDDEN, INNER = 576, 1536


def _rope(x: Tensor) -> Tensor:
    heads = x.view(len(x), -1, 64)
    out = torch.empty_like(heads)
    rope(heads, RopeTable.build(torch.linspace(1, 0.001, 32).double().numpy(), 1).at(torch.tensor([0])), out)
    return out


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("width", "compute"),
    [
        (2 * INNER, silu_mul),
        (2 * 77, silu_mul),
        (HIDDEN, lambda x: rms_norm(x, torch.linspace(0, 1, HIDDEN), 1e-5)),
        (HIDDEN, _rope),
        (HIDDEN, lambda x: choose_matmul([(HIDDEN, 960)]).linear(x, torch.ones(960, HIDDEN).tril_())),
    ],
    ids=["silu_mul", "silu_mul narrow", "rms_norm", "rope", "linear"],
)
def test_rows_alone_and_together(width: int, compute: Callable[[Tensor], Tensor], threads: int) -> None:
    before = torch.get_num_threads()
    x = torch.randn(100, width, generator=torch.Generator().manual_seed(0)) * 3
    torch.set_num_threads(1)
    together = compute(x)
    torch.set_num_threads(threads)
    try:
        for a, b in SLICES:
            assert torch.equal(compute(x[a:b]), together[a:b]), f"rows {a} to {b}"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("group_size", [1, 3])
def test_attention_of_a_row_alone_and_together(group_size: int) -> None:
    """As the only row, as one of many sequences, and as part of a chunk."""
    kernel = choose_matmul([(64, 256)])
    random = torch.Generator().manual_seed(0)
    pool = LayerKv.of(torch.randn(120, 2, 2, 16 * 64, generator=random).half(), 64)
    tables = [torch.randperm(120, generator=random)[:40].tolist() for _ in range(6)]
    ends = [640, 512, 511, 257, 256, 16]
    num_rows = 16
    query = torch.randn(len(ends) * num_rows, 2 * group_size, 64, generator=random)
    whole = plan_attention(tables, ends, num_rows, 16)
    together = paged_attention(query, pool, whole, kernel, Workspace())
    for index, (table, end) in enumerate(zip(tables, ends, strict=True)):
        for first, last in ((0, 1), (15, 16), (2, 9), (0, 16)):
            rows = slice(index * num_rows + first, index * num_rows + last)
            part = plan_attention([table], [end - num_rows + last], last - first, 16)
            alone = paged_attention(query[rows], pool, part, kernel, Workspace())
            assert torch.equal(alone, together[rows]), f"sequence {index}, rows {first} to {last}"


def test_results_outlive_the_workspace() -> None:
    """One row of one sequence is the shape in which the result could be a view of scratch memory."""
    workspace, pool = Workspace(), LayerKv.of(torch.randn(4, 2, 2, 16 * 16), 16)
    group = plan_attention([[0, 1]], [20], 1, 16)
    first = paged_attention(torch.randn(1, 4, 16), pool, group, NativeMatmul(), workspace)
    kept = first.clone()
    paged_attention(torch.randn(1, 4, 16), pool, group, NativeMatmul(), workspace)
    assert torch.equal(first, kept)


def test_sequences_of_a_group_must_be_sorted() -> None:
    with pytest.raises(ValueError, match="longest first"):
        plan_attention([[0], [1]], [3, 4], 1, 16)


def _uneven_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A BLAS that sums in another order when there are many rows."""
    if len(x) < 20:
        return linear(x, weight, bias)
    half = x.shape[1] // 2
    rest = linear(x[:, half:], weight[:, half:])
    return linear(x[:, :half], weight[:, :half], bias) + rest


def test_a_blas_that_rounds_by_shape_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism, "linear", _uneven_linear)
    assert not determinism.row_invariant([(256, 128)])


@pytest.mark.parametrize(("invariant", "expected"), [(True, NativeMatmul), (False, TiledMatmul)])
def test_choice_follows_the_measurement(
    monkeypatch: pytest.MonkeyPatch, invariant: bool, expected: type[Matmul]
) -> None:
    monkeypatch.setattr(matmul, "row_invariant", lambda shapes: invariant)
    assert isinstance(choose_matmul([(256, 128)]), expected)


def test_tiles_are_exact_even_over_an_uneven_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "linear", _uneven_linear)
    x, weight = torch.randn(100, 64), torch.randn(32, 64)
    together = TiledMatmul().linear(x, weight)
    assert all(torch.equal(TiledMatmul().linear(x[a:b], weight), together[a:b]) for a, b in SLICES)
    uneven = NativeMatmul().linear(x, weight)
    assert not torch.equal(NativeMatmul().linear(x[:1], weight), uneven[:1])


def test_branch_is_the_best_that_the_cpu_has() -> None:
    avx2 = {"sse4_2", "avx2", "fma"}
    avx512 = avx2 | {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
    assert mkl_branch(avx2) == "AVX2,STRICT"
    assert mkl_branch(avx512) == "AVX512,STRICT"
    assert mkl_branch(avx512 - {"avx512vl"}) == "AVX2,STRICT"
    assert mkl_branch(()) == "AVX2,STRICT"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [mkl_branch(environment.cpu_flags()), "1000"]),
        ({"MKL_CBWR": "COMPATIBLE", "GOMP_SPINCOUNT": "7"}, ["COMPATIBLE", "7"]),
        ({"OMP_WAIT_POLICY": "active"}, [mkl_branch(environment.cpu_flags()), "None"]),
    ],
    ids=["nothing", "both", "policy"],
)
def test_environment_is_set_before_torch_where_it_was_not(given: dict[str, str], expected: list[str]) -> None:
    ours = ("MKL_CBWR", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    start = {name: value for name, value in os.environ.items() if name not in ours} | given
    code = (
        "import os, sys, libs.kernels;"
        "print(os.environ['MKL_CBWR'], os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=start, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [*expected, "False"]
