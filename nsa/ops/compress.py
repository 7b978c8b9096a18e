"""The ops of the compression `phi`: block means, and blocks gathered for a Linear.

Both are linear: their gradients need no tensor of the forward pass, only where the blocks lay.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nsa import checks
from nsa.geometry import n_compressed
from nsa.ops.registry import ROUTING, Op, stage
from nsa.sequences import Pooling, Sequences


def pooling_of(like: Tensor, length: int, cu_seqlens: Tensor | None, block: int, stride: int) -> Pooling:
    return Pooling(Sequences(like.shape[0], length, like.device, cu_seqlens), block, stride)


def shape_of(like: Tensor, length: int, width: int) -> tuple[int, ...]:
    """Tokens without queries."""
    return like.shape[0], length, length, like.shape[2], like.shape[2], width, width


def empty_blocks(x: Tensor, cu_seqlens: Tensor | None, block: int, stride: int, width: int) -> Tensor:
    batch, length, groups, _ = x.shape
    n_slots = n_compressed(length, block, stride) if cu_seqlens is None else length // stride
    return x.new_empty(batch, n_slots, groups, width)


def run_mean(x: Tensor, cu_seqlens: Tensor | None, block: int, stride: int, backend: str, strict: bool) -> Tensor:
    checks.check_cu_seqlens_values(cu_seqlens, x.shape[1], strict)
    checks.check_finite(strict, x=x)
    shape = shape_of(x, x.shape[1], x.shape[3])
    run = stage("compress", "compress_mean_forward", shape, x, backend, strict, packed=cu_seqlens is not None)
    mean: Tensor = run(x, pooling_of(x, x.shape[1], cu_seqlens, block, stride))
    return mean.contiguous()


def run_mean_backward(
    dout: Tensor, cu_seqlens: Tensor | None, length: int, block: int, stride: int, backend: str, strict: bool
) -> Tensor:
    shape, packed = shape_of(dout, length, dout.shape[3]), cu_seqlens is not None
    run = stage("compress", "compress_mean_backward", shape, dout, backend, strict, backward=True, packed=packed)
    dx: Tensor = run(dout, pooling_of(dout, length, cu_seqlens, block, stride))
    return dx.contiguous()


def run_gather(
    x: Tensor, position: Tensor, cu_seqlens: Tensor | None, block: int, stride: int, backend: str, strict: bool
) -> Tensor:
    checks.check_cu_seqlens_values(cu_seqlens, x.shape[1], strict)
    checks.check_finite(strict, x=x, position=position)
    shape = shape_of(x, x.shape[1], x.shape[3])
    run = stage("compress", "gather_blocks_forward", shape, x, backend, strict, packed=cu_seqlens is not None)
    blocks: Tensor = run(x, position, pooling_of(x, x.shape[1], cu_seqlens, block, stride))
    return blocks.contiguous()


def run_gather_backward(
    dout: Tensor, cu_seqlens: Tensor | None, length: int, block: int, stride: int, backend: str, strict: bool
) -> tuple[Tensor, Tensor]:
    shape, packed = shape_of(dout, length, dout.shape[3] // block), cu_seqlens is not None
    run = stage("compress", "gather_blocks_backward", shape, dout, backend, strict, backward=True, packed=packed)
    dx, dposition = run(dout, pooling_of(dout, length, cu_seqlens, block, stride))
    return dx.contiguous(), dposition.contiguous()


PLACES = "Tensor? cu_seqlens, int block, int stride"
GRADIENT_PLACES = "Tensor? cu_seqlens, int length, int block, int stride"

COMPRESS_MEAN = Op(
    "compress_mean",
    f"Tensor x, {PLACES}, {ROUTING}",
    "Tensor",
    run_mean,
    lambda x, cu_seqlens, block, stride, *_: empty_blocks(x, cu_seqlens, block, stride, x.shape[3]),
)
COMPRESS_MEAN_BACKWARD = Op(
    "compress_mean_backward",
    f"Tensor dout, {GRADIENT_PLACES}, {ROUTING}",
    "Tensor",
    run_mean_backward,
    lambda dout, cu_seqlens, length, *_: dout.new_empty(dout.shape[0], length, *dout.shape[2:]),
)
GATHER_BLOCKS = Op(
    "gather_blocks",
    f"Tensor x, Tensor position, {PLACES}, {ROUTING}",
    "Tensor",
    run_gather,
    lambda x, position, cu_seqlens, block, stride, *_: empty_blocks(x, cu_seqlens, block, stride, block * x.shape[3]),
)


def fake_gather_backward(dout: Tensor, cu_seqlens: Tensor | None, length: int, block: int, *_: Any) -> Any:
    batch, _, groups, width = dout.shape
    return dout.new_empty(batch, length, groups, width // block), dout.new_empty(block, width // block)


GATHER_BLOCKS_BACKWARD = Op(
    "gather_blocks_backward",
    f"Tensor dout, {GRADIENT_PLACES}, {ROUTING}",
    "(Tensor, Tensor)",
    run_gather_backward,
    fake_gather_backward,
)


def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *_, cu_seqlens, block, stride, backend, strict = inputs
    ctx.save_for_backward(cu_seqlens)
    ctx.rest = (x.shape[1], block, stride, backend, strict)


def mean_gradients(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
    dx = None if dout is None else COMPRESS_MEAN_BACKWARD(dout.contiguous(), *ctx.saved_tensors, *ctx.rest)
    return (dx, *[None] * 5)


def gather_gradients(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = (None, None)
    if dout is not None:
        grads = GATHER_BLOCKS_BACKWARD(dout.contiguous(), *ctx.saved_tensors, *ctx.rest)
    return (*grads, *[None] * 5)


COMPRESS_MEAN.differentiate(save, mean_gradients)
GATHER_BLOCKS.differentiate(save, gather_gradients)
