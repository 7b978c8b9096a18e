"""The ops of the compression `phi`: block means, and blocks gathered for a Linear.

Both are linear: their gradients need no tensor of the forward pass, only where the blocks lay.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nsa import checks
from nsa.backends.stages import compress_stage
from nsa.ops.registry import Op, schema_arguments
from nsa.sequences import Pooling, Sequences, branch_of, hyperparameters


class CompressionOp:
    """`nsa::<name>` and its backward. `gathers`: a block's tokens side by side, positions added; else their mean."""

    def __init__(self, name: str, *, gathers: bool) -> None:
        self.name, self.gathers = name, gathers
        n = 1 + gathers
        schema = schema_arguments("x position" if gathers else "x", "cu_seqlens", hyperparameters(Pooling))
        self.forward: Op[Tensor] = Op(name, schema, self.run_forward, self.fake_forward)
        # A length may be a symbol of a compiler: as `int` it would become a constant.
        schema = f"Tensor dout, Tensor? cu_seqlens, SymInt length, {schema_arguments('', '', hyperparameters(Pooling))}"
        self.backward: Op[Any] = Op(f"{name}_backward", schema, self.run_backward, self.fake_backward, outputs=n)
        self.forward.differentiate(self.backward, lambda inputs, _: (inputs[n], inputs[0].shape[1], *inputs[n + 1 :]))

    def run_forward(self, x: Tensor, *args: Any) -> Any:
        *position, cu_seqlens, block, stride = args[:-2]
        pooling = branch_of(Pooling, x, x.shape[1], cu_seqlens, None, block, stride)
        return self.compute(x, *position, pooling, *args[-2:])

    def compute(self, x: Tensor, *args: Any) -> Any:
        *position, pooling, backend, strict = args
        checks.check_cu_seqlens_values(pooling.sequences.cu_seqlens, x.shape[1], strict)
        checks.check_finite(strict, **dict(zip(("x", "position"), (x, *position), strict=False)))
        run = compress_stage(f"{self.name}_forward", x, pooling, x.shape[3], backend, strict)
        return run(x, *position, pooling).contiguous()

    def run_backward(self, dout: Tensor, cu_seqlens: Tensor | None, length: int, *args: Any) -> Any:
        return self.differentiate(dout, branch_of(Pooling, dout, length, cu_seqlens, None, *args[:-2]), *args[-2:])

    def differentiate(self, dout: Tensor, pooling: Pooling, backend: str, strict: bool) -> Any:
        head_dim = dout.shape[3] // (pooling.block if self.gathers else 1)
        run = compress_stage(f"{self.name}_backward", dout, pooling, head_dim, backend, strict, backward=True)
        return tuple(x.contiguous() for x in run(dout, pooling)) if self.gathers else run(dout, pooling).contiguous()

    def fake_forward(self, x: Tensor, *args: Any) -> Tensor:
        *_, cu_seqlens, block, stride, _, _ = args
        # Not `branch_of`, which remembers: a length may be a symbol here.
        n_blocks = Pooling(Sequences(x.shape[0], x.shape[1], x.device, cu_seqlens), block, stride).count
        return x.new_empty(x.shape[0], n_blocks, x.shape[2], x.shape[3] * (block if self.gathers else 1))

    def fake_backward(self, dout: Tensor, cu_seqlens: Tensor | None, length: int, block: int, *_: Any) -> Any:
        dx = dout.new_empty(dout.shape[0], length, dout.shape[2], dout.shape[3] // (block if self.gathers else 1))
        return (dx, dout.new_empty(block, dx.shape[3])) if self.gathers else dx


COMPRESS_MEAN = CompressionOp("compress_mean", gathers=False)
GATHER_BLOCKS = CompressionOp("gather_blocks", gathers=True)
