"""Launches every Triton kernel once on small odd shapes, for a tool that watches each access (`sanitize.py`).

python tests/gpu/every_kernel.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from helpers import Case, random_inputs
from torch import Tensor

from nsa.backends.triton import combine, compress, compressed, scores, selected, sliding

KNOBS = {"block": 32, "stride": 16, "select_block": 64, "n_select": 4, "n_init": 1, "n_local": 1, "window": 100}
CASES = {
    "plain, 6 heads a group": Case(length=333, groups=2, heads=6, d_k=64, d_v=64, **KNOBS),
    "packed, one-token documents": Case(
        length=333, groups=1, heads=4, d_k=128, d_v=128, documents=(1, 0, 200, 1, 131), **KNOBS
    ),
    "batch, wider keys": Case(length=131, batch=2, groups=2, heads=3, d_k=192, d_v=128, **KNOBS),
    "one token": Case(length=1, groups=2, heads=2, d_k=80, d_v=80, **KNOBS),
}
METHODS = ("query", "block", "dense")


def run(case: Case, dtype: torch.dtype) -> None:
    inputs = random_inputs(case, dtype).map(Tensor.cuda)
    cu = None if case.cu_seqlens is None else case.cu_seqlens.cuda()
    whole = {"scale": case.d_k**-0.5, "cu_seqlens": cu, "q_start": None}
    cut = {"block": case.block, "stride": case.stride}
    q, k_cmp, v_cmp = inputs.of("compressed")
    _, k, v = inputs.of("selected")

    o, lse = compressed.compressed_forward(q, k_cmp, v_cmp, **cut, **whole)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    compressed.compressed_backward(do, dlse, q, k_cmp, v_cmp, o, lse, **cut, **whole)
    indices = scores.select_blocks(q, k_cmp, lse, **case.selection, **whole)
    for method in METHODS if cu is None else METHODS[:2]:
        chosen, chosen_lse = selected.selected_forward(
            q, k, v, indices, select_block=case.select_block, method=method, **whole
        )
    tile = selected.pick_backward(case.d_k, case.d_v, dtype)
    # As it is, and in as many launches as there can be.
    for cut_up in (tile, replace(tile, scratch=1)):
        selected.selected_backward(
            do, dlse, q, k, v, indices, chosen, chosen_lse, select_block=case.select_block, tile=cut_up, **whole
        )
    slid, slid_lse = sliding.sliding_forward(q, k, v, window=case.window, **whole)
    sliding.sliding_backward(do, dlse, q, k, v, slid, slid_lse, window=case.window, **whole)
    gates = torch.rand(*q.shape[:3], 3, device="cuda", dtype=dtype)
    combine.combine_forward(o, chosen, slid, gates)
    combine.combine_backward(do, o, chosen, slid, gates)
    # The three as parts of one gradient.
    products = combine.gates_backward(do, o, chosen, slid, gates)
    mixed = [{"gate": gates[..., i], "product": products[..., i]} for i in range(3)]
    dq, _, _ = selected.selected_backward(
        do, None, q, k, v, indices, chosen, chosen_lse, select_block=case.select_block, **mixed[1], **whole
    )
    sliding.sliding_backward(do, None, q, k, v, slid, slid_lse, window=case.window, **mixed[2], into=dq, **whole)
    compressed.compressed_backward(do, None, q, k_cmp, v_cmp, o, lse, **cut, **mixed[0], into=dq, **whole)

    place = {**cut, "cu_seqlens": cu}
    compress.compress_mean_backward(compress.compress_mean_forward(k, **place), length=case.length, **place)
    position = torch.randn(case.block, case.d_k, device="cuda", dtype=dtype)
    compress.gather_blocks_backward(compress.gather_blocks_forward(k, position, **place), length=case.length, **place)
    torch.cuda.synchronize()


def main() -> None:
    for name, case in CASES.items():
        for dtype in (torch.bfloat16, torch.float16):
            run(case, dtype)
            print(f"every kernel ran: {name}, {dtype}", flush=True)


if __name__ == "__main__":
    main()
