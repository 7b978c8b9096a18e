"""Peak memory is linear in the sequence: measured in processes of their own, because a peak never goes down again."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nsa

MEBIBYTE = 1 << 20

# Forward and backward of the whole attention: 12 heads in 2 groups, width 64, fp32, the paper's knobs.
MEASURE = r"""
import json, re, sys, time
from pathlib import Path
import torch
from nsa import NSAConfig
from nsa.functional import nsa_attention

torch.set_num_threads(int(sys.argv[2]))
length, document = int(sys.argv[1]), int(sys.argv[3])
config = NSAConfig(dim=768, n_heads=12, n_kv_groups=2, d_k=64, d_v=64)
n_compressed = length // 16 if document else (length - 32) // 16 + 1
cu_seqlens = torch.arange(0, length + 1, document, dtype=torch.int32) if document else None


def peak_bytes():
    # Not `ru_maxrss`: that one goes on from the process which started this one.
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def attention(length, n_compressed, cu_seqlens=None):
    def leaf(n, heads, width=64):
        return torch.rand(1, n, heads, width, requires_grad=True)

    q, gates = leaf(length, 12), leaf(length, 12, 3)
    keys = [leaf(n, 2) for n in [n_compressed] * 2 + [length] * 4]
    nsa_attention(q, *keys, gates, config=config, cu_seqlens=cu_seqlens).square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, gates, *keys))


# Libraries load and allocate on first use: a short sequence first, so that the difference is the long one's own.
attention(64, 3)
baseline = peak_bytes()
begin = time.perf_counter()
attention(length, n_compressed, cu_seqlens)
print(json.dumps({"peak": peak_bytes() - baseline, "total": peak_bytes(), "seconds": time.perf_counter() - begin}))
"""


@functools.cache
def measure(length: int, threads: int = 1, document: int = 0) -> dict[str, float]:
    """`peak` above what the process held before, `total` with it, both in bytes, and `seconds`.

    One sequence, or a pack of documents `document` tokens long.
    """
    root = str(Path(nsa.__file__).parent.parent)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NSA_")}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(length), str(threads), str(document)],
        env={**environment, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_memory_grows_at_most_linearly_with_length() -> None:
    short, long = measure(4096), measure(8192)
    assert long["peak"] <= 2.2 * short["peak"], f"{short['peak'] / MEBIBYTE:.0f} to {long['peak'] / MEBIBYTE:.0f} MiB"
    # A fixed workspace hides a quadratic part from the ratio; a single [S, S] matrix of fp32 would add 192 MiB.
    added_per_token = (long["peak"] - short["peak"]) / 4096
    input_and_gradient_bytes = 2 * 4 * (12 * 64 + 12 * 3 + 4 * 2 * 64 + 2 * 2 * 64 // 16)
    assert added_per_token <= 8 * input_and_gradient_bytes, f"{added_per_token / 1024:.0f} KiB a token"


@pytest.mark.slow
@pytest.mark.parametrize("document", [1, 4])
def test_short_documents_take_little_more_memory_than_one_long(document: int) -> None:
    pack, plain = measure(4096, document=document), measure(4096)
    assert pack["peak"] <= 1.1 * plain["peak"], f"{plain['peak'] / MEBIBYTE:.0f} to {pack['peak'] / MEBIBYTE:.0f} MiB"


@pytest.mark.slow
def test_training_8k_tokens_takes_less_than_2_gib() -> None:
    measured = measure(8_192, threads=2)
    print(f"S=8192: {measured['total'] / MEBIBYTE:.0f} MiB, {measured['seconds']:.1f} s")
    assert measured["total"] < 2048 * MEBIBYTE
