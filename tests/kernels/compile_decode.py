"""Compiles the decode kernels for a GPU that is not there, as `compiling.py` does; prints what each of them takes.

python tests/kernels/compile_decode.py --target sm_90 --steps 64/4/128x1
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from compiling import TARGETS, Compiled, Recorder, stand_in, table

# heads/groups/head_dim x new tokens, and how long the cache is
STEPS = {
    "64/4/128x1": (64, 4, 128, 1, 65536, "bfloat16"),
    "64/4/128x4": (64, 4, 128, 4, 65536, "bfloat16"),
    "12/2/64x1": (12, 2, 64, 1, 131072, "bfloat16"),
    "16/2/256x1 fp32": (16, 2, 256, 1, 8192, "float32"),
}


def compile_steps(steps: list[str], target: str) -> list[Compiled]:
    recorder = Recorder(TARGETS[target].arch, branch="decode")
    stand_in(TARGETS[target], recorder)
    for step in steps:
        recorder.shape = step
        compile_step(step)
    return recorder.found


def compile_step(step: str) -> None:
    import torch

    from nsa.backends.triton.decode import Hyperparameters, decode_attention
    from nsa.geometry import n_compressed

    heads, groups, width, tokens, max_len, name = STEPS[step]
    dtype = getattr(torch, name)

    def store(places: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.empty(1, places + 1, groups, width, dtype=dtype)
        return x, x

    how = Hyperparameters(32, 16, 64, 16, 1, 2, 512, width**-0.5, max_len)
    q = torch.empty(2, tokens, heads, width, dtype=dtype)
    gates = torch.empty(2, tokens, heads, 3, dtype=dtype)
    start = torch.zeros(2, dtype=torch.int32)
    stores = (store(n_compressed(max_len, 32, 16)), store(max_len), store(544))
    decode_attention(q, *stores, gates, start, how)


def main() -> None:
    parser = argparse.ArgumentParser(description="compile the decode kernels for a GPU that is not there")
    parser.add_argument("--target", default="sm_90", choices=TARGETS)
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=STEPS)
    parser.add_argument("--out", type=Path, help="where to write JSON, in place of a table to read")
    arguments = parser.parse_args()
    found = compile_steps(arguments.steps, arguments.target)
    if arguments.out is None:
        print(table(arguments.target, found))
    else:
        arguments.out.write_text(json.dumps([asdict(x) for x in found]))


if __name__ == "__main__":
    main()
