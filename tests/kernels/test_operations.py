"""Every version of every operation against its reference, on every case."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from libs.kernels.cases import relative_error
from libs.kernels.operations import OPERATIONS, Operation

VERSIONS = [(operation, name) for operation in OPERATIONS for name in operation.versions]


@pytest.mark.parametrize(("operation", "version"), VERSIONS, ids=[f"{o.name}-{v}" for o, v in VERSIONS])
def test_version_agrees_with_reference(operation: Operation, version: str) -> None:
    compute: Callable[..., Tensor] = operation.versions[version]
    num_cases = 0
    for case in operation.cases():
        error = relative_error(compute(*case.arguments), case.expected)
        assert error <= operation.limit, f"{case.name}: {error:.2e}"
        num_cases += 1
    assert num_cases >= 4


def test_relative_error_sees_a_wrong_element_a_wrong_shape_and_nan() -> None:
    expected = torch.arange(1.0, 1001.0)
    wrong = expected.clone()
    wrong[3] = 5.0
    assert relative_error(expected, expected) == 0.0
    assert relative_error(wrong, expected) > 1e-5
    assert relative_error(expected[:-1], expected) == float("inf")
    wrong[3] = float("nan")
    assert relative_error(wrong, expected) == float("inf")
