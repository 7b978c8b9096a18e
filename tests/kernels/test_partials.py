"""Sums of partials, in Triton's interpreter: added in their order, rounded once."""

from __future__ import annotations

import pytest
import torch

# First: it skips this file where kernels cannot run.
from interpreted import DEVICE  # isort: skip

from nsa.backends.triton.partials import sum_partials


@pytest.mark.parametrize("n_partials", [2, 3, 7])
def test_two_tensors_are_summed_in_the_order_of_their_partials(n_partials: int) -> None:
    parts = [torch.randn(n_partials, n, device=DEVICE) for n in (1040, 48)]
    sums = [torch.empty(x.shape[1], dtype=torch.float16, device=DEVICE) for x in parts]
    add = sum_partials(n_partials, 1040, 48)
    add(p_part=parts[0], p_out=sums[0], p_part_1=parts[1], p_out_1=sums[1])
    for part, total in zip(parts, sums, strict=True):
        expected = part[0].clone()
        for x in part[1:]:
            expected += x
        assert torch.equal(total, expected.half())


def test_one_tensor_of_many_partials() -> None:
    part = torch.randn(70, 144, device=DEVICE)
    total = torch.empty(144, device=DEVICE)
    sum_partials(70, 144, at_once=32, block=64)(p_part=part, p_out=total, p_part_1=part, p_out_1=total)
    torch.testing.assert_close(total.double(), part.double().sum(dim=0), rtol=0, atol=1e-5)
