"""Peak memory is linear in the sequence: measured in processes of their own, because a peak never goes down again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nsa

MEBIBYTE = 1 << 20

# Forward and backward of the whole attention: 12 heads in 2 groups, head_dim 64, fp32, the paper's hyperparameters.
MEASURE = r"""
import json, re, sys
from pathlib import Path
import torch
from nsa import NSAConfig
from nsa.functional import nsa_attention

torch.set_num_threads(1)
length, document = map(int, sys.argv[1:])
config = NSAConfig(dim=768, n_heads=12, n_kv_groups=2, d_k=64, d_v=64)
n_compressed = length // 16 if document else (length - 32) // 16 + 1
cu_seqlens = torch.arange(0, length + 1, document, dtype=torch.int32) if document else None


def peak_bytes():
    # Not `ru_maxrss`: that one goes on from the process which started this one.
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def attention(length, n_compressed, cu_seqlens=None):
    def leaf(n, heads, head_dim=64):
        return torch.rand(1, n, heads, head_dim, requires_grad=True)

    q, gates = leaf(length, 12), leaf(length, 12, 3)
    keys = [leaf(n, 2) for n in [n_compressed] * 2 + [length] * 4]
    nsa_attention(q, *keys, gates, config=config, cu_seqlens=cu_seqlens).square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, gates, *keys))


# Libraries load and allocate on first use: a short sequence first, so that the difference is the long one's own.
attention(64, 3)
baseline = peak_bytes()
attention(length, n_compressed, cu_seqlens)
print(json.dumps({"peak": peak_bytes() - baseline, "total": peak_bytes()}))
"""


def measure(length: int, document: int = 0) -> dict[str, float]:
    """`peak` above what the process held before, and `total` with it, in bytes.

    One sequence, or a varlen batch of documents `document` tokens long.
    """
    root = str(Path(nsa.__file__).parent.parent)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NSA_")}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(length), str(document)],
        # Every large tensor is mapped alone, so that no hole that a freed one leaves in the heap counts.
        env={**environment, "PYTHONPATH": root, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_memory_is_linear_in_tokens_whatever_the_documents() -> None:
    """One test: workers that share its parts would each measure the shorter sequence."""
    short, long = measure(2048), measure(4096)
    assert long["total"] < 1024 * MEBIBYTE
    assert long["peak"] <= 2.2 * short["peak"], f"{short['peak'] / MEBIBYTE:.0f} to {long['peak'] / MEBIBYTE:.0f} MiB"
    # A fixed workspace hides a quadratic part from the ratio; a single [S, S] matrix of fp32 would add 48 MiB.
    added_per_token = (long["peak"] - short["peak"]) / 2048
    input_and_gradient_bytes = 2 * 4 * (12 * 64 + 12 * 3 + 4 * 2 * 64 + 2 * 2 * 64 // 16)
    assert added_per_token <= 8 * input_and_gradient_bytes, f"{added_per_token / 1024:.0f} KiB a token"
    for document in (1, 4):
        varlen = measure(2048, document)
        sizes = f"{short['peak'] / MEBIBYTE:.0f} to {varlen['peak'] / MEBIBYTE:.0f} MiB"
        assert varlen["peak"] <= 1.1 * short["peak"], f"documents of {document}: {sizes}"
