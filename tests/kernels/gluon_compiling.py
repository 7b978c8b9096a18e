"""Compiles the Gluon kernels for sm_90 without a GPU, by the means of `compiling.py`, and reads their machine code.

    python tests/kernels/gluon_compiling.py --shapes 64/4/128 12/2/128 > kernels.json

What makes these kernels fast is an order that ptxas is free to change: arithmetic between the waits for two products
in flight. `order` tells what a loop does in which order, `sums` how much is added before each wait. `hazards` finds
instructions that touch the registers of a product in flight: in each loop, also over its back edge, and in the whole
code as it lies there. `n_loads` is compared with what Triton's passes leave of them: those of 3.6 and 3.7 take values
that are carried by a loop and only bound an inner one for dead, and their loads too. `scratch` is what needs shared
memory before warp specialization: the arguments of partitions come to lie there, and Triton 3.6 has no barrier between.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict, dataclass, field, replace

import compiling
import sass

SPILL = ("LDL", "STL")
SCRATCH = re.compile(r"\b(?:tt\.(?:reduce|scan|gather|histogram|atomic_\w+|call)|ttg\.convert_layout)\b")
# Long enough for the tiles of long sequences, but for one.
SHAPES = {name: replace(compiling.SHAPES[name], length=32768) for name in ("64/4/128", "32/8/128 varlen", "32/8/64")}
SHAPES["12/2/128"] = compiling.Shape(12, 2, 128, 128, length=32768)
SHAPES["64/4/128 offset"] = compiling.Shape(64, 4, 128, 128, length=32768, offset=True)
SHAPES["16/2/128 varlen"] = compiling.Shape(16, 2, 128, 128, varlen=True, length=32768)
SHAPES["64/4/128 fp16 8k"] = compiling.Shape(64, 4, 128, 128, dtype="float16", length=8192)


@dataclass
class Loop:
    """An innermost loop with products. `order`: "product", "exp" and "wait 1" as they follow each other, runs once.
    `sums`: additions between each wait and the product before it."""

    order: list[str]
    sums: list[int]
    spills: int
    hazards: list[str]


@dataclass
class Compiled:
    shape: str
    branch: str
    kernel: str
    shared: int
    products: int
    waits: int
    overwritten: list[str]
    lost_loads: int
    scratch: list[str]
    hazards: list[str]
    loops: list[Loop] = field(default_factory=list)


def product_loops(code: list[sass.Instruction]) -> list[list[sass.Instruction]]:
    """The innermost loops that hold products."""
    found = [body for body in sass.loops(code) if any(x.name.startswith("HGMMA") for x in body)]

    def inside(body: list[sass.Instruction], other: list[sass.Instruction]) -> bool:
        return body is not other and other[0].address <= body[0].address and body[-1].address <= other[-1].address

    return [body for body in found if not any(inside(other, body) for other in found)]


def kind(instruction: sass.Instruction) -> str | None:
    if instruction.name.startswith("HGMMA"):
        return "product"
    if instruction.name.startswith("MUFU.EX2"):
        return "exp"
    if instruction.name.startswith("WARPGROUP.DEPBAR"):
        return f"wait {int(instruction.operands[-1], 16)}"
    return None


def order(body: list[sass.Instruction]) -> list[str]:
    steps: list[str] = []
    for step in map(kind, body):
        if step is not None and steps[-1:] != [step]:
            steps.append(step)
    return steps


def sums(body: list[sass.Instruction]) -> list[int]:
    found, count = [], 0
    for instruction in body:
        step = kind(instruction)
        if step == "product":
            count = 0
        elif step is not None and step.startswith("wait"):
            found.append(count)
            count = 0
        elif instruction.name.startswith(("FFMA", "FADD")):
            count += 1
    return found


def registers(instruction: sass.Instruction) -> set[int]:
    return {int(number) for operand in instruction.operands for number in re.findall(r"\bR(\d+)\b", operand)}


def hazards(code: list[sass.Instruction]) -> list[str]:
    """Instructions that write a product's left operand or touch its sum before the wait."""
    in_flight: list[list[sass.Instruction]] = []
    group: list[sass.Instruction] = []
    found = []
    for instruction in code:
        step = kind(instruction)
        if step == "product":
            group.append(instruction)
            # The last product of a group counts it as one to be waited for.
            if any("gsb0" in operand for operand in instruction.operands):
                in_flight.append(group)
                group = []
        elif step is not None and step.startswith("wait"):
            pending = int(step.removeprefix("wait "))
            in_flight = in_flight[len(in_flight) - pending :] if pending else []
        else:
            for product in (x for issued in [*in_flight, group] for x in issued):
                touched = instruction.written | registers(instruction)
                if instruction.written & product.left_operand or touched & product.written:
                    found.append(f"{instruction.name} at {instruction.address:#x} under {product.address:#x}")
    return found


def read(text: str) -> list[Loop]:
    return [
        Loop(order(body), sums(body), sum(x.name.startswith(SPILL) for x in body), hazards(body + body))
        for body in product_loops(sass.instructions(text))
    ]


def n_loads(source: str) -> int:
    """Loads of a kernel and, as often as they are called, of its functions, in the IR that Triton starts from."""
    functions: dict[str, tuple[int, list[str]]] = {}
    for text in source.split("tt.func ")[1:]:
        name, *called = re.findall(r'@("[^"]+"|[\w.]+)\(', text)
        functions[name] = (text.count("tt.load "), called)

    def count(name: str) -> int:
        loads, called = functions[name]
        return loads + sum(map(count, called))

    return count(next(iter(functions)))


def scratch(ttgir: str) -> list[str]:
    """Operations before warp specialization, where there is any, that need shared memory of their own."""
    before, specialized, _ = ttgir.partition("ttg.warp_specialize(")
    return SCRATCH.findall(before) if specialized else []


class Recorder(compiling.Recorder):
    """Reads the loops of what is compiled."""

    def add(self, name: str, kernel: object, seconds: float) -> None:
        # Of a pass in runs, every launch has the same kernel.
        if id(kernel) in self.seen:
            return
        self.seen.add(id(kernel))
        text = compiling.dump(kernel.asm["cubin"], "-sass")
        found = Compiled(
            self.shape,
            self.branch,
            name,
            kernel.metadata.shared,
            *sass.products_and_waits(text),
            sass.overwritten(text),
            n_loads(kernel.asm["source"]) - kernel.asm["ttgir"].count("tt.load "),
            scratch(kernel.asm["ttgir"]),
            hazards(sass.instructions(text)),
            read(text),
        )
        self.found.append(found)


def compile_shape(shape: compiling.Shape, recorder: Recorder) -> None:
    """Forward and backward of the branches, as the launchers would launch them, and what runs for two at once."""
    import torch

    from nsa.backends.triton import branches, ranged, selected
    from nsa.sequences import Compressed, Pooling, Saved, Selected, Sequences, Sliding, Upstream, attention_branches

    cu = torch.tensor([0, shape.length // 4, shape.length], dtype=torch.int32) if shape.varlen else None
    n_queries = shape.length // 2 if shape.offset else shape.length
    start = torch.tensor([shape.length - n_queries]) if shape.offset else None
    sequences = Sequences(1, n_queries, torch.device("cpu"), cu, start)
    keys = Sequences(1, shape.length, torch.device("cpu"), cu)

    def tensor(n: int, heads: int) -> torch.Tensor:
        return torch.empty(1, n, heads, shape.d_k, dtype=getattr(torch, shape.dtype))

    q, do = tensor(n_queries, shape.heads), tensor(n_queries, shape.heads)
    lse = torch.empty(1, n_queries, shape.heads)
    # In training the branches add to one dq, but in fp16.
    upstream = Upstream(do, dq=None if shape.dtype == "float16" else torch.empty_like(q))
    for name, n_keys, branch in (
        ("compressed", Pooling(keys, 32, 16).count, Compressed(sequences, 32, 16, 0.1)),
        ("sliding", shape.length, Sliding(sequences, 512, 0.1)),
    ):
        k, v = tensor(n_keys, shape.groups), tensor(n_keys, shape.groups)
        with recorder.at(name):
            getattr(ranged, f"{name}_forward")(q, k, v, branch)
            getattr(ranged, f"{name}_backward")(upstream, Saved(q, k, v, do, lse), branch)
    indices = torch.zeros(1, n_queries, shape.groups, 16, dtype=torch.int32)
    with recorder.at("selected"):
        # The method of longer sequences, where this one is read densely.
        selected.selected_forward(q, k, v, indices, Selected(sequences, 64, 0.1), method="block")
        selected.selected_backward(upstream, Saved(q, k, v, do, lse, indices), Selected(sequences, 64, 0.1))
    with recorder.at("fused"):
        over = attention_branches(q, None, None, None, 32, 16, 64, 16, 1, 2, 512, 0.1)
        branches.selected_sliding_forward(q, k, v, indices, k, v, over)


def main() -> None:
    parser = argparse.ArgumentParser(description="compile the Gluon kernels for a GPU that is not there")
    parser.add_argument("--shapes", nargs="+", required=True, choices=SHAPES)
    arguments = parser.parse_args()
    recorder = Recorder(90)
    compiling.stand_in(compiling.TARGETS["sm_90"], recorder, gluon=True)
    for name in arguments.shapes:
        recorder.shape = name
        compile_shape(SHAPES[name], recorder)
    errors = [x for x in recorder.found if isinstance(x, compiling.Compiled)]
    if errors:
        sys.exit("\n".join(f"{x.shape} {x.branch} {x.kernel}: {x.error}" for x in errors))
    json.dump([asdict(x) for x in recorder.found], sys.stdout)


if __name__ == "__main__":
    main()
