"""RoPE's kernel gives the bits of plain torch, and its gradients."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE
from torch import Tensor

from nsa.backends.triton.rope import Rotate, rotate_one
from nsa.rope import Angles, Rope, rotate

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 37, 3, 24
ROPE = Rope(HEAD_DIM)


def angles(kind: str) -> Angles:
    device = torch.device(DEVICE)
    if kind == "every fourth":
        return ROPE.table(4 * LENGTH, device, torch.float32, stride=4)
    if kind == "of each row":
        starts = torch.tensor([[5], [90]], device=device)
        return ROPE.angles(starts + torch.arange(LENGTH, device=device), torch.float32)
    if kind == "of one row":
        return ROPE.angles(torch.arange(7, 7 + LENGTH, device=device)[None], torch.float32)
    return ROPE.table(LENGTH, device, torch.float32)


def heads_of_a_branch(dtype: torch.dtype) -> Tensor:
    """Two branches' heads lie side by side, of which these are the second's."""
    return torch.randn(BATCH, LENGTH, 2 * HEADS, HEAD_DIM, dtype=dtype, device=DEVICE)[:, :, HEADS:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["all", "every fourth", "of each row", "of one row"])
def test_rotates_as_plain_torch(kind: str, dtype: torch.dtype) -> None:
    x, (cos, sin) = heads_of_a_branch(dtype), angles(kind)
    assert torch.equal(rotate_one(x, cos, sin, False), rotate(x, (cos, sin)))
    assert torch.equal(rotate_one(x, cos, sin, True), rotate(x, (cos, -sin)))


def test_gradients_are_rotated_back() -> None:
    x, y = (heads_of_a_branch(torch.float32).requires_grad_() for _ in range(2))
    given = angles("of each row")
    grads = torch.randn(2, BATCH, LENGTH, HEADS, HEAD_DIM, device=DEVICE).unbind()
    found = torch.autograd.grad(Rotate.apply(*given, x, y), [x, y], grads)
    expected = torch.autograd.grad([rotate(x, given), rotate(y, given)], [x, y], grads)
    for dx, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(dx, wanted)
