"""Whether two trees compute the same bits: hashes of outputs and gradients of fixed inputs, by the public functions.

python benchmarks/bits.py --out after.json          # in each of the two trees, on the same GPU
python benchmarks/bits.py --compare before.json after.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa import NSAConfig, nsa_attention, ops

# name: heads, groups, d_k, d_v, batch, length or lengths of varlen documents, dtype
CASES: dict[str, tuple[int, int, int, int, int, Any, torch.dtype]] = {
    "12/2/64 2k bf16": (12, 2, 64, 64, 2, 2048, torch.bfloat16),
    "12/2/64 odd bf16": (12, 2, 64, 64, 1, 5003, torch.bfloat16),
    "12/2/64 varlen bf16": (12, 2, 64, 64, 1, (1, 700, 0, 33, 2311), torch.bfloat16),
    "12/2/64 fp16": (12, 2, 64, 64, 1, 3000, torch.float16),
    "4/2/64 fp32": (4, 2, 64, 64, 1, 1500, torch.float32),
    "64/4/128 8k bf16": (64, 4, 128, 128, 1, 8192, torch.bfloat16),
    "64/4/128 20k bf16": (64, 4, 128, 128, 1, 20001, torch.bfloat16),
    "64/2/128 query bf16": (64, 2, 128, 128, 1, 6000, torch.bfloat16),
    "32/8/128 varlen bf16": (32, 8, 128, 128, 1, (4096, 1, 3000, 64), torch.bfloat16),
    "16/4/192/128 bf16": (16, 4, 192, 128, 1, 3001, torch.bfloat16),
}
HYPERPARAMETERS = {"block": 32, "stride": 16}


def digest(x: Tensor) -> str:
    raw = x.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


def results(name: str) -> dict[str, str]:
    n_heads, n_groups, d_k, d_v, batch, lengths, dtype = CASES[name]
    length = lengths if isinstance(lengths, int) else sum(lengths)
    cu_seqlens = None
    if not isinstance(lengths, int):
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    generator = torch.Generator().manual_seed(len(name))

    def normal(heads: int, head_dim: int) -> Tensor:
        x = torch.randn(batch, length, heads, head_dim, generator=generator).to(dtype)
        return x.cuda().requires_grad_()

    q, k_sel, k_win, k_raw = normal(n_heads, d_k), *(normal(n_groups, d_k) for _ in range(3))
    v_sel, v_win, v_raw = (normal(n_groups, d_v) for _ in range(3))
    gates = normal(n_heads, 3).detach().sigmoid().requires_grad_()
    position = torch.randn(32, d_k, generator=generator).to(dtype).cuda().requires_grad_()
    pooled: dict[str, Any] = {**HYPERPARAMETERS, "cu_seqlens": cu_seqlens, "backend": "triton"}
    blocks = ops.gather_blocks(k_raw, position, **pooled)
    k_cmp = blocks.unflatten(3, (32, d_k)).mean(dim=3)
    v_cmp = ops.compress_mean(v_raw, **pooled)
    config = NSAConfig(dim=64, n_heads=n_heads, n_kv_groups=n_groups, d_k=d_k, d_v=d_v, backend="triton")
    tensors = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
    o = nsa_attention(*tensors, config=config, cu_seqlens=cu_seqlens)
    leaves = {"q": q, "k_raw": k_raw, "v_raw": v_raw, "k_sel": k_sel, "v_sel": v_sel, "k_win": k_win, "v_win": v_win}
    leaves |= {"gates": gates, "position": position}
    do = torch.randn(o.shape, generator=generator).to(o)
    grads = torch.autograd.grad(o, tuple(leaves.values()), do)
    found = {"blocks": blocks, "k_cmp": k_cmp, "v_cmp": v_cmp, "o": o}
    found |= {f"d{leaf}": grad for leaf, grad in zip(leaves, grads, strict=True)}
    return {quantity: digest(x) for quantity, x in found.items()}


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Prints what differs; the number of differing tensors."""
    different = 0
    for name, hashes in before.items():
        wrong = [quantity for quantity, value in hashes.items() if after.get(name, {}).get(quantity) != value]
        different += len(wrong)
        print(f"{name:<24} {len(hashes) - len(wrong)} of {len(hashes)} the same {' '.join(wrong)}")
    return different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write this tree's hashes here")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    args = parser.parse_args()
    if args.compare:
        before, after = (json.loads(path.read_text()) for path in args.compare)
        return 1 if compare(before, after) else 0
    found = {}
    for name in args.cases:
        found[name] = results(name)
        print(name, found[name]["o"], flush=True)
        torch.cuda.empty_cache()
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
