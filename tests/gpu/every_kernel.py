"""Launches every kernel of ours once on small odd shapes, for a tool that watches each access (`sanitize.py`).

python tests/gpu/every_kernel.py [--apart] [--zeros] [NAME ...]

Without a GPU `tests/test_every_kernel.py` lists what would be launched.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from helpers import Case, branches, random_inputs
from torch import Tensor

from nsa import NSAConfig, PagedNSACache
from nsa.backends.gluon import tiles
from nsa.backends.triton import branches as together
from nsa.backends.triton import combine, compress, prepare, ranged, ranged_backward, selected, selection
from nsa.backends.triton.decode import linear, plan, step
from nsa.backends.triton.greedy import most_likely
from nsa.backends.triton.launch import Layout
from nsa.backends.triton.row_statistics import row_statistics
from nsa.backends.triton.selected import index
from nsa.backends.triton.tiles import Visibility, capability
from nsa.model import LM, LMConfig
from nsa.sequences import Saved, Upstream

DEVICE = "cuda"
DEFAULTS = {"block": 32, "stride": 16, "select_block": 64, "n_select": 4, "n_init": 1, "n_local": 1, "window": 100}
ONE_SLOT = {"n_select": 1, "n_init": 0, "n_local": 0}
CASES = {
    "fixed, 6 heads per group": Case(length=333, groups=2, heads=6, d_k=64, d_v=64, **DEFAULTS),
    "varlen, one-token documents": Case(
        length=333, groups=1, heads=4, d_k=128, d_v=128, documents=(1, 0, 200, 1, 131), **DEFAULTS
    ),
    "batch, wider keys": Case(length=131, batch=2, groups=2, heads=3, d_k=192, d_v=128, **DEFAULTS),
    # On Hopper, with the varlen cases, the kernels in Gluon.
    "varlen, 8 heads per group": Case(
        length=333, groups=1, heads=8, d_k=128, d_v=128, documents=(100, 33, 200), **DEFAULTS
    ),
    "fixed, 16 heads per group": Case(length=333, groups=1, heads=16, d_k=128, d_v=128, **DEFAULTS),
    # Longer than what is read densely: there the selected and the sliding branch in one kernel.
    "fixed, one slot": Case(length=333, groups=1, heads=16, d_k=128, d_v=128, **DEFAULTS | ONE_SLOT),
    # Rows by pointer, and the other head_dim.
    "fixed, head_dim 128, 6 heads per group": Case(length=333, groups=1, heads=6, d_k=128, d_v=128, **DEFAULTS),
    "fixed, head_dim 64, 4 heads per group": Case(length=333, groups=1, heads=4, d_k=64, d_v=64, **DEFAULTS),
    "cached, 64 heads": Case(length=333, groups=4, heads=16, d_k=128, d_v=128, **DEFAULTS),
    "one token": Case(length=1, groups=2, heads=2, d_k=80, d_v=80, **DEFAULTS),
}
# Position of the first query, where keys come before it.
STARTS = {"cached, 64 heads": 101}
METHODS = ("query", "block", "dense")
# Tokens per step, heads, groups, head_dim, how blocks are compressed, and the cache's form.
STEPS: dict[str, tuple[int, tuple[int, int, int], str, dict[str, Any]]] = {
    "steps of one token": (1, (12, 2, 64), "mlp", {}),
    "steps of five tokens": (5, (12, 2, 64), "mean", {}),
    "steps with pages in fp8": (3, (12, 2, 64), "mlp", {"page_size": 64, "n_pages": 10, "quantize": "fp8"}),
    # On Hopper in Gluon.
    "steps of four tokens, 16 heads per group": (4, (16, 1, 128), "mean", {}),
}
NAMES = (*STEPS, *CASES)
# On Hopper some of their kernels store results by TMA, all of them in half precision.
STORED_BY_TMA = {
    "varlen, one-token documents",
    "varlen, 8 heads per group",
    "fixed, 16 heads per group",
    "fixed, one slot",
    "fixed, head_dim 64, 4 heads per group",
    "cached, 64 heads",
    "steps of four tokens, 16 heads per group",
}


def pick_short_runs(k: Layout, visibility: Visibility, pick: Any = tiles.pick_dq) -> tiles.QueryTile | None:
    """A few runs through the buffer of `dS`, where there would be one."""
    found = pick(k, visibility)
    return None if found is None else replace(found, scratch=1 << 17)


def run(case: Case, dtype: torch.dtype, start: int | None = None) -> None:
    inputs = random_inputs(case, dtype).map(lambda x: x.to(DEVICE))
    over, pooling = branches(case, DEVICE), branches(case, DEVICE).pooling
    if start is not None:
        q_start = torch.full((case.batch,), start, dtype=torch.int32, device=DEVICE)
        over = branches(case, DEVICE, q_start=q_start, length=case.length - start)
        inputs = inputs.but(q=inputs.q[:, start:].contiguous())
    q, k_cmp, v_cmp = inputs.of("compressed")
    _, k, v = inputs.of("selected")

    o, lse = ranged.compressed_forward(q, k_cmp, v_cmp, over.compressed)
    upstream = Upstream(torch.randn_like(o), torch.randn_like(lse))
    saved = Saved(q, k_cmp, v_cmp, o, lse)
    ranged.compressed_backward(upstream, saved, over.compressed)
    indices = selection.select_blocks(q, k_cmp, lse, over.selection)
    for method in METHODS if case.documents is None else METHODS[:2]:
        o_sel, lse_sel = selected.selected_forward(q, k, v, indices, over.selected, method=method)
    saved_sel = Saved(q, k, v, o_sel, lse_sel, indices)
    tile = selected.pick_backward(case.d_k, case.d_v, dtype)
    # As it is, and in as many launches as there can be.
    for cut_up in (tile, replace(tile, scratch=1)):
        selected.selected_backward(upstream, saved_sel, over.selected, tile=cut_up)
    # Segments in the order of their first queries, as in long sequences: ranked, and sorted.
    for max_ranked in (index.MAX_RANKED, 0):
        with mock.patch.multiple(index, SORT_FROM_QUERIES=0, MAX_RANKED=max_ranked):
            selected.plan_forward.cache_clear()
            selected.selected_forward(q, k, v, indices, over.selected, method="block")
    selected.plan_forward.cache_clear()
    o_win, lse_win = ranged.sliding_forward(q, k, v, over.sliding)
    fused = together.selected_sliding_forward(q, k, v, indices, k, v, over)
    assert fused is not None or case.n_select > 1 or capability(q.device) != (9, 0), "both in one kernel"
    saved_win = Saved(q, k, v, o_win, lse_win)
    ranged.sliding_backward(upstream, saved_win, over.sliding)
    with mock.patch.object(tiles, "pick_dq", pick_short_runs):
        ranged_backward.plan.cache_clear()
        ranged.compressed_backward(upstream, saved, over.compressed)
        ranged.sliding_backward(upstream, saved_win, over.sliding)
    ranged_backward.plan.cache_clear()
    gates = torch.rand(*q.shape[:3], 3, device=DEVICE, dtype=dtype)
    outputs = (o, o_sel, o_win, gates)
    combine.combine_forward(*outputs)
    *_, products = combine.combine_backward(upstream.do, *outputs)
    # The three as parts of one gradient.
    row_statistics(Upstream(upstream.do, None, gates[..., 0], products[..., 0].float()), saved, case.groups)
    lses = (lse, lse_sel, lse_win)
    _, gated = prepare.prepare_backward(upstream.do, outputs[:3], lses, gates, case.groups)
    dq, _, _ = selected.selected_backward(gated[1], saved_sel, over.selected)
    ranged.sliding_backward(gated[2]._replace(dq=dq), saved_win, over.sliding)
    ranged.compressed_backward(gated[0]._replace(dq=dq), saved, over.compressed)

    compress.compress_mean_backward(compress.compress_mean_forward(k, pooling), pooling)
    position = torch.randn(case.block, case.d_k, device=DEVICE, dtype=dtype)
    compress.gather_blocks_backward(compress.gather_blocks_forward(k, position, pooling), pooling)
    torch.cuda.synchronize()


def linear_into_zeros(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` into zeros: initcheck does not see the TMA stores of cuBLAS, and would report every read of them."""
    y = torch.matmul(x, weight.t(), out=x.new_zeros(*x.shape[:-1], weight.shape[0]))
    return y if bias is None else y + bias


def empty_or_zeros(*size: Any, dtype: torch.dtype | None = None, empty: Any = torch.empty, **options: Any) -> Tensor:
    """`torch.empty`, but zeros in half precision: initcheck would report every read of what was stored by TMA. Whether
    such results are written is for `tests/gpu`, where all are poisoned."""
    new = torch.zeros if dtype in (torch.bfloat16, torch.float16) else empty
    return new(*size, dtype=dtype, **options)


def decode(n_tokens: int, shape: tuple[int, int, int], phi: str, form: dict[str, Any]) -> None:
    """Steps of a model past a border of blocks, in rows of uneven lengths of which one does not have all tokens."""
    hyperparameters: dict[str, Any] = {
        "l": 32,
        "d": 16,
        "l_sel": 64,
        "n_sel": 4,
        "n_init": 1,
        "n_local": 1,
        "w": 100,
        "phi": phi,
    }
    n_heads, n_groups, head_dim = shape
    heads: dict[str, Any] = {"n_heads": n_heads, "n_kv_groups": n_groups, "d_k": head_dim, "d_v": head_dim}
    config = NSAConfig(dim=64, **heads, backend="triton", **hyperparameters)
    model = LM(LMConfig(vocab_size=70, n_layers=2, hidden=96, seq_len=320, attn=config)).to(DEVICE, torch.bfloat16)
    caches = model.new_cache(2, 320, **form)
    for cache in caches:
        if isinstance(cache, PagedNSACache):
            cache.allocate([320, 320])
    tokens = torch.randint(70, (2, 300), device=DEVICE)
    real = torch.arange(300, device=DEVICE) >= torch.tensor([[0], [210]], device=DEVICE)
    counts = torch.tensor([n_tokens, n_tokens - 1], device=DEVICE)
    with torch.no_grad(), mock.patch("torch.nn.functional.linear", linear_into_zeros):
        model.hidden(tokens, attention_mask=real, caches=caches)
        for given in (None, None, None, counts):
            x = model.hidden(tokens[:, :n_tokens], counts=given, caches=caches)
            most_likely(model.logits(x))
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description="launch every kernel of ours once")
    parser.add_argument("names", nargs="*", default=list(NAMES), metavar="NAME", help="default: all")
    parser.add_argument("--apart", action="store_true", help="let no launch overlap with the one before it")
    parser.add_argument("--zeros", action="store_true", help="where results are stored by TMA, start from zeros")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        if arguments.apart:
            for module in (plan, step, linear):
                stack.enter_context(mock.patch.object(module, "dependent_launch", return_value={"PDL": False}))
        for name in arguments.names:
            zeros = arguments.zeros and name in STORED_BY_TMA
            with mock.patch("torch.empty", empty_or_zeros) if zeros else nullcontext():
                if name in STEPS:
                    decode(*STEPS[name])
                    print(f"every kernel of a decode step ran: {name}", flush=True)
                    continue
                for dtype in (torch.bfloat16, torch.float16):
                    run(CASES[name], dtype, STARTS.get(name))
                    print(f"every kernel ran: {name}, {dtype}", flush=True)
    print("the end", flush=True)


if __name__ == "__main__":
    main()
