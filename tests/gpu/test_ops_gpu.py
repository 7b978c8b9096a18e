"""The ops as torch sees them when our kernels run on a GPU: schemas, fakes, strides, activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import BRANCHES, COMPRESSIONS, Case, assert_same_bits
from op_arguments import (
    NAMES,
    attention_arguments,
    attention_backward_arguments,
    branch_arguments,
    branch_backward_arguments,
    combine_arguments,
    compression_arguments,
    compression_backward_arguments,
    head_major,
    op_of,
    selection_arguments,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa import NSAAttention, NSAConfig

DEFAULTS = {"block": 32, "stride": 16, "select_block": 64, "n_select": 4, "window": 50}
CASES = {
    "fixed": Case(length=150, batch=2, groups=2, heads=3, d_k=16, d_v=32, **DEFAULTS),
    "varlen": Case(length=150, groups=2, heads=3, d_k=16, d_v=32, documents=(13, 0, 1, 136), **DEFAULTS),
}


def with_gradient(arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.requires_grad_() for x in arguments)


# Made on the CPU, where sdpa gives what a backward op needs of the forward; `on_gpu` names the backend anew.
ARGUMENTS: dict[str, Callable[[Case], tuple[Any, ...]]] = {
    **{NAMES[name]: lambda case, name=name: branch_arguments(name, case, "sdpa") for name in BRANCHES},
    **{
        f"{NAMES[name]}_backward": lambda case, name=name: branch_backward_arguments(name, case, "sdpa")
        for name in BRANCHES
    },
    "select_blocks": lambda case: selection_arguments(case, "sdpa"),
    **{name: lambda case, name=name: compression_arguments(name, case, "sdpa") for name in COMPRESSIONS},
    **{
        f"{name}_backward": lambda case, name=name: compression_backward_arguments(name, case, "sdpa")
        for name in COMPRESSIONS
    },
    "combine": lambda case: (*with_gradient(combine_arguments(case.d_v)), "sdpa", False),
    "combine_backward": lambda case: (torch.randn(2, 5, 6, case.d_v), *combine_arguments(case.d_v), "sdpa", False),
    "attention": lambda case: attention_arguments(case, "sdpa"),
    "attention_backward": lambda case: attention_backward_arguments(case, "sdpa"),
}


def on_gpu(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    def move(x: Any) -> Any:
        return x.detach().cuda().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    return (*map(move, arguments[:-2]), "triton", False)


def test_every_op_is_here() -> None:
    registered = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("nsa::")}
    assert registered == {*ARGUMENTS, "cosines"}


def test_the_angles_pass_opcheck() -> None:
    angle = torch.rand(5, 1, 4, dtype=torch.float64, device="cuda")
    torch.library.opcheck(torch.ops.nsa.cosines.default, (angle, torch.float32))


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_op_passes_opcheck(name: str, kind: str) -> None:
    torch.library.opcheck(op_of(name), on_gpu(ARGUMENTS[name](CASES[kind])))


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_head_major_tensors_give_the_same_bits(
    name: str, kind: str, selected_by: Callable[[str | None], list[str]]
) -> None:
    """`[B, H, S, D]` seen as `[B, S, H, D]`: what a projection that splits heads first leaves."""
    arguments = tuple(x.detach() if isinstance(x, Tensor) else x for x in on_gpu(ARGUMENTS[name](CASES[kind])))
    turned = tuple(map(head_major, arguments))
    assert not all(x.is_contiguous() for x in turned if isinstance(x, Tensor))
    methods = ("dense", "block", "query") if (name, kind) == ("selected_attention", "fixed") else (None,)
    for method in methods:
        selected_by(method)
        expected, got = (as_dict(op_of(name)(*tensors)) for tensors in (arguments, turned))
        assert_same_bits(got, expected)


def as_dict(outputs: Tensor | tuple[Tensor, ...]) -> dict[str, Tensor]:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return {f"output {i}": x for i, x in enumerate(outputs)}


def test_activation_checkpointing_changes_no_bit_of_a_gradient() -> None:
    config = NSAConfig(dim=128, n_heads=12, n_kv_groups=2, d_k=64, d_v=64, backend="triton")
    attn = NSAAttention(config).cuda()
    x = torch.randn(2, 500, config.dim, device="cuda", requires_grad=True)
    dy = torch.randn(2, 500, config.dim, device="cuda")

    def gradients(run: Callable[..., Tensor]) -> dict[str, Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            y = run(x)
        leaves = {"x": x, **dict(attn.named_parameters())}
        return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype)), strict=True))

    expected = gradients(attn)
    assert_same_bits(gradients(lambda x: checkpoint(attn, x, use_reentrant=False)), expected)
