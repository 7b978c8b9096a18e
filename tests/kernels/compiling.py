"""Compiles, without a GPU, what the launchers would compile on a given one, and reports what each kernel takes.

    python tests/kernels/compiling.py --target 86 --shapes 64/4/128 256 > kernels.json

A stand-in for Triton's driver names the target, `JITFunction.run` stops where it would launch, and `tiles.capability`
and `tiles.sm_count` answer for the target. Then the real launchers are called with CPU tensors: tiles, argument
alignment and descriptors are those of a user's GPU. Nothing is computed, so buffers hold whatever the memory held, and
no launcher may read one on the host.

All of this is set for the whole process, so it is one process a target; without TRITON_INTERPRET, which would leave
nothing to compile.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import layouts
import sass

KIB = 1024
# Columns of tensor memory that a CTA may have, where there is any.
TENSOR_MEMORY = 512


@dataclass(frozen=True)
class Target:
    """`shared`: bytes a CTA may ask for. `sms`: of a common GPU of this kind, by which work is split."""

    arch: int
    shared: int
    sms: int

    @property
    def name(self) -> str:
        return f"sm_{self.arch}"


TARGETS = {
    t.name: t
    for t in (
        Target(80, 163 * KIB, 108),
        Target(86, 99 * KIB, 84),
        Target(89, 99 * KIB, 128),
        Target(90, 227 * KIB, 132),
        Target(100, 227 * KIB, 148),
        Target(120, 99 * KIB, 170),
    )
}


@dataclass(frozen=True)
class Shape:
    """`length` is long enough that counts are multiples of 16 and neither one nor small, as in use.

    `offset`: the queries are the last half of the keys, by `q_start`. `selected_only`: the branch that holds most in
    shared memory, where all of them take too long to compile.
    """

    heads: int
    groups: int
    d_k: int
    d_v: int
    dtype: str = "bfloat16"
    varlen: bool = False
    offset: bool = False
    length: int = 2048
    selected_only: bool = False


SHAPES = {
    "64/4/128": Shape(64, 4, 128, 128),
    "32/8/128 varlen": Shape(32, 8, 128, 128, varlen=True),
    "12/2/64": Shape(12, 2, 64, 64),
    "32/8/64": Shape(32, 8, 64, 64),
    "32/8/64 offset": Shape(32, 8, 64, 64, offset=True),
    "192/128": Shape(32, 8, 192, 128),
    "256": Shape(16, 2, 256, 256),
    "64/1/256": Shape(64, 1, 256, 256),
    "64/4/128 fp32": Shape(64, 4, 128, 128, dtype="float32"),
    "32/1/256 fp32": Shape(32, 1, 256, 256, dtype="float32", selected_only=True),
}


@dataclass
class Compiled:
    """One kernel as compiled; `error` if it could not be. `spills` counts registers kept in memory, as Triton does;
    `overwritten` names products that read what is no longer there, `products` and `waits` tell whether they are
    serialized, see `sass.py`; `mistaken` names sums over the wrong warps, see `layouts.py`. `code`: the machine code of
    a kernel in Gluon, for `gluon_compiling.py` to read."""

    shape: str
    branch: str
    kernel: str
    warps: int = 0
    registers: int = 0
    spills: int = 0
    shared: int = 0
    tensor_memory: int = 0
    seconds: float = 0.0
    products: int = 0
    waits: int = 0
    overwritten: list[str] = field(default_factory=list)
    mistaken: list[str] = field(default_factory=list)
    error: str = ""
    code: str = ""


@dataclass
class Recorder:
    """What was compiled, and for which shape and branch that was."""

    arch: int
    shape: str = ""
    branch: str = ""
    found: list[Compiled] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    @contextmanager
    def at(self, branch: str) -> Iterator[None]:
        self.branch = branch
        yield

    def add(self, name: str, kernel: Any, seconds: float) -> None:
        # Triton returns the same object for the same kernel.
        if id(kernel) in self.seen:
            return
        self.seen.add(id(kernel))
        registers, spills = resources(kernel.asm["cubin"])
        # Only Hopper's products take an operand from registers while others go on.
        code = dump(kernel.asm["cubin"], "-sass") if self.arch == 90 else ""
        meta = kernel.metadata
        self.found.append(
            Compiled(
                self.shape,
                self.branch,
                name,
                meta.num_warps,
                registers,
                spills,
                meta.shared,
                getattr(meta, "tmem_size", None) or 0,
                round(seconds, 2),
                *sass.products_and_waits(code),
                sass.overwritten(code),
                layouts.mistaken(kernel.asm["ttgir"]),
                code=code if name.startswith("hopper") else "",
            )
        )

    def fail(self, name: str, error: Exception) -> None:
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        self.found.append(Compiled(self.shape, self.branch, name, error=" ".join(lines)[-600:]))


def dump(cubin: bytes, what: str) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and how many more it keeps in memory."""
    text = dump(cubin, "--dump-resource-usage")
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], (found["STACK"] + found["LOCAL"]) // 4


class Driver:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", target.arch, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def stand_in(target: Target, recorder: Recorder, *, gluon: bool = False) -> None:
    """From here on this process compiles for `target` and launches nothing. `gluon`: its kernels, and no others."""
    import triton
    from triton.errors import TritonError
    from triton.runtime.jit import JITFunction

    loaded = [name for name in sys.modules if name.startswith("nsa.backends.triton.")]
    assert not loaded, f"these would keep the real capability: {loaded}"
    from nsa.backends.triton import tiles

    if not gluon:
        from nsa.backends import gluon as kernels

        kernels.unavailable = lambda: "these are compiled by themselves, see gluon_compiling.py"
    tiles.capability = lambda device: divmod(target.arch, 10)
    tiles.sm_count = lambda device: target.sms
    triton.runtime.driver.set_active(Driver(target))
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Returns nothing, as the interpreter does: there is no kernel that a `Launch` could keep and call."""
        name, start = self.fn.__name__, time.perf_counter()
        if name.startswith("hopper") != gluon:
            return
        try:
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        except (TritonError, RuntimeError) as error:
            # The next kernel of the launcher may still compile, and is worth knowing.
            recorder.fail(name, error)
        else:
            recorder.add(name, kernel, time.perf_counter() - start)

    JITFunction.run = compile_only


def compile_shape(
    shape: Shape, recorder: Recorder, *, compressed_too: bool, ungated_too: bool, without_products_too: bool
) -> None:
    """The launchers, with the library's usual hyperparameters, as training calls them.

    `ungated_too`: the gradients of a branch alone. `without_products_too`: the kernels that multiply no matrices.
    """
    import torch

    from nsa.backends.triton import combine, compress, prefill, prepare, ranged, selected, selection
    from nsa.sequences import Compressed, Pooling, Saved, Selected, Selection, Sequences, Sliding, Upstream

    block, stride, select_block, n_select, scale = 32, 16, 64, 16, 0.1
    dtype, device, n_keys = getattr(torch, shape.dtype), torch.device("cpu"), shape.length
    cu = torch.tensor([0, n_keys // 4, n_keys], dtype=torch.int32) if shape.varlen else None
    length = n_keys // 2 if shape.offset else n_keys
    q_start = torch.tensor([n_keys - length], dtype=torch.int32) if shape.offset else None
    sequences = Sequences(1, length, device, cu, q_start)
    pooling = Pooling(Sequences(1, n_keys, device, cu), block, stride)

    def tensor(n: int, heads: int, *head_dim: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(1, n, heads, *head_dim, dtype=kind)

    q = tensor(length, shape.heads, shape.d_k)
    k, v = tensor(n_keys, shape.groups, shape.d_k), tensor(n_keys, shape.groups, shape.d_v)
    k_cmp, v_cmp = tensor(pooling.count, shape.groups, shape.d_k), tensor(pooling.count, shape.groups, shape.d_v)
    o = do = tensor(length, shape.heads, shape.d_v)
    lse = tensor(length, shape.heads, kind=torch.float32)
    gates, product = tensor(length, shape.heads, 3), tensor(length, shape.heads, 3, kind=torch.float32)
    indices = torch.zeros(1, length, shape.groups, n_select, dtype=torch.int32)

    def gradients(backward: Callable[..., Any], branch: Any, i_gate: int, saved: Saved) -> None:
        if shape.offset:
            # Where queries start is added to their positions: the products are those of the same shape without.
            return
        gated = Upstream(do, None, gates[..., i_gate], product[..., i_gate], torch.empty_like(q))
        for upstream in (Upstream(do), gated) if ungated_too else (gated,):
            backward(upstream, saved, branch)

    if compressed_too:
        with recorder.at("compressed"):
            over_blocks = Compressed(sequences, block, stride, scale)
            ranged.compressed_forward(q, k_cmp, v_cmp, over_blocks)
            gradients(ranged.compressed_backward, over_blocks, 0, Saved(q, k_cmp, v_cmp, o, lse))
    with recorder.at("selected"):
        over_selected = Selected(sequences, select_block, scale)
        # None: what a sequence as short as this one gets, unless it is varlen.
        for method in ("query", "block", None):
            selected.selected_forward(q, k, v, indices, over_selected, method=method)
        gradients(selected.selected_backward, over_selected, 1, Saved(q, k, v, o, lse, indices))
    if shape.selected_only:
        return
    with recorder.at("sliding"):
        over_window = Sliding(sequences, 512, scale)
        ranged.sliding_forward(q, k, v, over_window)
        gradients(ranged.sliding_backward, over_window, 2, Saved(q, k, v, o, lse))
    with recorder.at("selection"):
        how = Selection(sequences, block, stride, select_block, n_select, n_init=1, n_local=2, scale=scale)
        selection.select_blocks(q, k_cmp, lse, how)
    if not without_products_too:
        return
    with recorder.at("combine"):
        combine.combine_forward(o, o, o, gates)
        combine.combine_backward(do, o, o, o, gates)
        prepare.prepare_backward(do, (o, o, o), (lse, lse, lse), gates, shape.groups)
    with recorder.at("compress"):
        compress.compress_mean_forward(k, pooling)
        compress.compress_mean_backward(k_cmp, pooling)
        rows = compress.gather_blocks_forward(k, torch.empty(block, shape.d_k, dtype=dtype), pooling)
        compress.gather_blocks_backward(rows, pooling)
    with recorder.at("prefill"):
        start = torch.zeros(1, dtype=torch.int32)
        for dtype_of_scales in (None, torch.float32):
            # Keys and values, or the scales of those in fp8.
            x, y = (k, v) if dtype_of_scales is None else (k[..., :1].to(dtype_of_scales),) * 2
            prefill.write_tokens((x, y), (x, y), start, start, ring=True)
            prefill.write_tokens((x, y), (x, y), start, start, block=block, stride=stride, table=start[:, None])
            prefill.read_tokens((x, y), (x, y), start, 511, q_start=start)
            prefill.read_pages((x, y), start[:, None], start, length)
        prefill.read_tokens((k, v), (k, v), start, block - 1, emitted=(block, stride))
        prefill.cached_angles(start, torch.empty(shape.d_k // 2, dtype=torch.float64), length)


def compile_all(target: str, shapes: list[str]) -> list[Compiled]:
    recorder = Recorder(TARGETS[target].arch)
    stand_in(TARGETS[target], recorder)
    for i, name in enumerate(shapes):
        recorder.shape = name
        # The head_dim hardly matters to kernels without a product: one shape of each kind of row is enough.
        # The compressed branch has the sliding one's kernels, less a loop, and the same tiles, but for those that were
        # measured: on Hopper up to a head_dim of 128. A gate adds to the gradients' work: one shape shows them without.
        shape = SHAPES[name]
        measured = target == "sm_90" and shape.d_k <= 128 and not (shape.offset or shape.varlen)
        compile_shape(
            shape,
            recorder,
            compressed_too=measured,
            ungated_too=target == "sm_90" and i == 0,
            without_products_too=i == 0 or shape.varlen,
        )
    return recorder.found


def table(target: str, found: list[Compiled]) -> str:
    """One line a kernel, in the order in which they were compiled."""
    lines = [
        f"{'target':7} {'shape':15} {'branch':10} {'kernel':24} warps registers spills shared KiB of "
        f"{TARGETS[target].shared // KIB}, products/waits"
    ]
    for x in found:
        what = f"{target:7} {x.shape:15} {x.branch:10} {x.kernel.removesuffix('_kernel'):24}"
        cost = f"{x.warps:5} {x.registers:9} {x.spills:6} {x.shared / KIB:10.1f} {x.products:9}/{x.waits}"
        lines.append(f"{what} {x.error or cost}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="compile the kernels for a GPU that is not there")
    parser.add_argument("--target", required=True, choices=TARGETS)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--out", type=Path, help="where to write JSON, in place of a table to read")
    arguments = parser.parse_args()
    found = compile_all(arguments.target, arguments.shapes)
    if arguments.out is None:
        print(table(arguments.target, found))
    else:
        arguments.out.write_text(json.dumps([asdict(x) for x in found]))


if __name__ == "__main__":
    main()
