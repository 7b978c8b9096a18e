"""`backend="triton"` on CPU tensors with TRITON_INTERPRET=1: the public ops, forward and backward, without a GPU."""

from __future__ import annotations

import pytest
import torch
from helpers import BRANCHES, Case, assert_close, random_inputs, results

# First: it skips this file where kernels cannot run.
from interpreted import INTERPRETED  # isort: skip

from nsa import ops, reference

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")

CASE = Case(length=24, batch=2, groups=1, heads=1, d_k=16, d_v=16)


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_branch_by_the_interpreter(branch: str) -> None:
    inputs = random_inputs(CASE, torch.float32)
    by_kernels = results(ops, branch, inputs, CASE, backend="triton")
    assert_close(by_kernels, results(reference, branch, inputs, CASE), 1e-4)


def test_bf16_is_refused_by_name() -> None:
    inputs = random_inputs(CASE, torch.bfloat16)
    with pytest.raises(ValueError, match="bf16"):
        results(ops, "sliding", inputs, CASE, backend="triton")
