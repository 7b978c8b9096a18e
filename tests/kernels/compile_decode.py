"""Compiles the decode kernels for a GPU that is not there, as `compiling.py` does; prints what each of them takes.

python tests/kernels/compile_decode.py --target sm_90 --steps 64/4/128x1
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from compiling import TARGETS, Compiled, Recorder, stand_in, table

PAGE = 64
# heads/groups/head_dim x new tokens, how long the cache is, and its form: paged, the branch that the gate is pinned to,
# or that it is dense attention
STEPS = {
    "64/4/128x1": (64, 4, 128, 1, 65536, "bfloat16"),
    "64/4/128x1 paged": (64, 4, 128, 1, 65536, "bfloat16"),
    "64/4/128x1 paged fp8": (64, 4, 128, 1, 65536, "bfloat16"),
    "64/4/128x4": (64, 4, 128, 4, 65536, "bfloat16"),
    "64/4/128x4 paged": (64, 4, 128, 4, 65536, "bfloat16"),
    "64/4/128x1 cmp": (64, 4, 128, 1, 65536, "bfloat16"),
    "64/4/128x1 sel": (64, 4, 128, 1, 65536, "bfloat16"),
    "64/4/128x1 win": (64, 4, 128, 1, 65536, "bfloat16"),
    "12/2/64x1": (12, 2, 64, 1, 131072, "bfloat16"),
    "12/2/64x1 dense": (12, 2, 64, 1, 131072, "bfloat16"),
    "64/4/128x8 dense": (64, 4, 128, 8, 131072, "bfloat16"),
    "16/2/256x1 fp32": (16, 2, 256, 1, 8192, "float32"),
    "12/2/64x16 linear": (12, 2, 64, 16, 1, "bfloat16"),
}


def compile_steps(steps: list[str], target: str, *, gluon: bool = False) -> list[Compiled]:
    """`gluon`: its kernels, and no others."""
    recorder = Recorder(TARGETS[target].arch, branch="decode")
    stand_in(TARGETS[target], recorder, gluon=gluon)
    for step in steps:
        recorder.shape = step
        compile_step(step)
    return recorder.found


def compile_step(step: str) -> None:
    """One step of a layer, by the launchers that it would call."""
    import torch

    from nsa.backends.triton.decode import (
        DenseStore,
        Hyperparameters,
        Mlp,
        Norm,
        Pages,
        Projected,
        Stores,
        Weights,
        decode_step,
        dense_step,
        linear_step,
    )
    from nsa.config import BRANCHES
    from nsa.geometry import n_compressed

    heads, groups, head_dim, tokens, max_len, name = STEPS[step]
    block, stride, dtype = 32, 16, getattr(torch, name)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def compile_linears() -> None:
        x, norm = tensor(2, tokens, 768), Norm(tensor(768), 1e-5)
        projections = [Weights(tensor(n, 768)) for n in (768, 384, 384)]
        linear_step(x, *projections, Weights(tensor(192, 768), tensor(192), "silu"), norm=norm, first=True)
        linear_step(tensor(2, tokens, 192), Weights(tensor(36, 192), tensor(36), "sigmoid"))
        linear_step(x, Weights(tensor(4096, 768), None, "silu"), norm=norm, paired=True)
        linear_step(tensor(2, tokens, 2048), Weights(tensor(768, 2048)), residual=x)

    if "linear" in step:
        compile_linears()
        return

    def pair(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor(2, length, groups, head_dim), tensor(2, length, groups, head_dim)

    lengths, frequencies = torch.zeros(2, dtype=torch.int32), torch.empty(head_dim // 2, dtype=torch.float64)
    if "dense" in step:
        store = DenseStore(pair(max_len + 1), lengths, lengths, frequencies)
        dense_step(tensor(2, tokens, heads, head_dim), pair(tokens), store, head_dim**-0.5, max_len)
        return
    branch = next((name for name in BRANCHES if step.endswith(name)), None)
    how = Hyperparameters(block, stride, 64, 16, 1, 2, 512, head_dim**-0.5, max_len, branch)
    new = Projected(tensor(2, tokens, heads, head_dim), pair(tokens), pair(tokens), pair(tokens))
    pairs = (pair(65), pair(n_compressed(max_len, block, stride) + 1), pair(max_len + 1), pair(545))
    pages = scales = None
    if "paged" in step:
        pages = Pages(torch.zeros(2, max_len // PAGE, dtype=torch.int32), lengths, PAGE)
        pairs = (pairs[0], pair(PAGE // stride), pair(PAGE), pairs[3])
    if "fp8" in step:
        scales = tuple((k[..., 0].float(), v[..., 0].float()) for k, v in pairs[1:])
        pairs = (pairs[0], *((k.to(torch.uint8), v.to(torch.uint8)) for k, v in pairs[1:]))
    stores = Stores(*pairs, lengths, lengths, frequencies, pages, scales)
    mlp = Mlp(
        tensor(block, head_dim),
        tensor(2 * head_dim, block * head_dim),
        tensor(2 * head_dim),
        tensor(head_dim, 2 * head_dim),
        tensor(head_dim),
    )
    for phi in ((mlp, mlp), None):
        decode_step(new, stores, tensor(2, tokens, heads, 3), how, phi=phi)
    compile_linears()


def main() -> None:
    parser = argparse.ArgumentParser(description="compile the decode kernels for a GPU that is not there")
    parser.add_argument("--target", default="sm_90", choices=TARGETS)
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=STEPS)
    parser.add_argument("--out", type=Path, help="where to write JSON, in place of a table to read")
    parser.add_argument("--gluon", action="store_true", help="the Gluon kernels, and no others")
    arguments = parser.parse_args()
    found = compile_steps(arguments.steps, arguments.target, gluon=arguments.gluon)
    if arguments.out is None:
        print(table(arguments.target, found))
    else:
        arguments.out.write_text(json.dumps([asdict(x) for x in found]))


if __name__ == "__main__":
    main()
