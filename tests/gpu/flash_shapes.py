"""Random legal shapes through a FlashAttention library on a GPU, compared with fp64; the log ends with counts.

    PYTHONPATH=tests python tests/gpu/flash_shapes.py --count 1000
    PYTHONPATH=tests compute-sanitizer --tool memcheck python tests/gpu/flash_shapes.py --count 20

Every shape is a problem that the backend supports. A shape fails by an exception, a NaN, or an error above the
derived tolerance; a crash ends the process, and the last line of the log is the shape that did it.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from helpers import Case, branches, random_inputs
from torch import Tensor

from nsa import reference
from nsa.backends.flash import FlashBackend
from nsa.backends.flash.libraries import Library, find_libraries
from nsa.sequences import Compressed, Saved, Sliding, Upstream
from nsa.settings import Settings
from nsa.testing import TOLERANCE_ROUNDINGS, max_error, tolerance

# Both sides of the kernels' tiles, and the smallest there are.
LENGTHS = (
    1,
    2,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    200,
    255,
    256,
    257,
    300,
    383,
    384,
    385,
    511,
    513,
)
HEAD_DIMS = (8, 16, 24, 40, 64, 72, 96, 128, 160, 192, 224, 256)


def backend_of(library: Library) -> FlashBackend:
    """Without a probe: this is the place where a crash may happen."""
    return FlashBackend(Settings(), (library,), folder=Path("unused"), prober=lambda *_: [])


def random_case(seed: int) -> tuple[Case, torch.dtype, int | None]:
    """A problem, its dtype, and for one in five how many queries sit at the end of a cache."""
    draw = random.Random(seed)
    pick = draw.choice
    length = pick(LENGTHS)
    documents = None
    if draw.random() < 0.35:
        cuts = sorted(draw.choices(range(length + 1), k=pick([1, 2, 5])))
        documents = tuple(b - a for a, b in pairwise([0, *cuts, length]))
    stride = pick([1, 4, 8, 16])
    head_dim = pick(HEAD_DIMS)
    case = Case(
        length=length,
        documents=documents,
        batch=1 if documents else pick([1, 2, 3]),
        groups=pick([1, 2, 3, 4]),
        heads=pick([1, 2, 3, 4, 6, 8, 16]),
        d_k=head_dim,
        d_v=pick([head_dim, head_dim, head_dim, max(8, head_dim // 2), 20]),
        stride=stride,
        block=stride * pick([1, 2, 4]),
        window=pick([1, 2, 16, 64, 100, 128, 512, 1000]),
        seed=seed,
    )
    queries = pick([1, 1, 3, 17]) if documents is None and draw.random() < 0.2 else None
    return case, pick([torch.bfloat16, torch.float16]), min(queries, length) if queries else None


def hyperparameters(branch: str, case: Case, **rest: Any) -> dict[str, Any]:
    own = case.compression if branch == "compressed" else {"window": case.window}
    cu_seqlens = None if case.cu_seqlens is None else case.cu_seqlens.cuda()
    return {**own, "scale": case.d_k**-0.5, "cu_seqlens": cu_seqlens, "q_start": None, **rest}


def gradients_for(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    do, dlse = (torch.randn(x.shape, generator=generator).bfloat16().to(x) for x in (o, lse))
    return do, dlse


def seen_by(branch: str, case: Case, q: Tensor, q_start: Tensor | None = None) -> Compressed | Sliding:
    """The branch as backends take it."""
    return getattr(branches(case, "cuda", q_start=q_start, batch=q.shape[0], length=q.shape[1]), branch)


def by_backend(
    backend: FlashBackend,
    branch: str,
    qkv: tuple[Tensor, ...],
    case: Case,
    q_start: Tensor | None = None,
    *,
    with_lse: bool,
) -> dict[str, Tensor]:
    seen = seen_by(branch, case, qkv[0], q_start)
    o, lse = getattr(backend, f"{branch}_forward")(*qkv, seen)
    if q_start is not None:
        return {"o": o, "lse": lse}
    do, dlse = gradients_for(o, lse)
    backward = getattr(backend, f"{branch}_backward")
    dq, dk, dv = backward(Upstream(do, dlse if with_lse else None), Saved(*qkv, o, lse), seen)
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def by_reference(branch: str, qkv: tuple[Tensor, ...], *, with_lse: bool, **options: Any) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in qkv]
    o, lse = getattr(reference, f"{branch}_attention")(*leaves, **options)
    found = {"o": o.detach(), "lse": lse.detach()}
    if options["q_start"] is not None:
        return found
    do, dlse = gradients_for(o, lse)
    pairs = [(o, do), (lse, dlse)] if with_lse and lse.requires_grad else [(o, do)]
    gradients = torch.autograd.grad([x for x, _ in pairs], leaves, [g for _, g in pairs])
    return found | dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def too_far(found: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor], case: Case) -> list[str]:
    """What is off by more than twice the error of plain torch in the same dtype, and a few roundings.

    `ds = p * (dp - delta)` is what two sums of the size `|do| |v|` leave of each other: their rounding stays.
    """
    cancelled = TOLERANCE_ROUNDINGS * torch.finfo(torch.float32).eps * 4 * case.d_v**0.5 * 4 * case.d_k**-0.5
    wrong = []
    for name, value in exact.items():
        got = found[name]
        if got.dtype != plain[name].dtype or got.shape != value.shape:
            wrong.append(f"{name} is {tuple(got.shape)} of {got.dtype}")
            continue
        allowed = tolerance(plain[name], value) + (cancelled if name in ("dq", "dk") else 0.0)
        error = max_error(got, value)
        if error > allowed:
            wrong.append(f"{name} is off by {error:.3e}, allowed {allowed:.3e}")
    return wrong


def check(
    backend: FlashBackend, branch: str, case: Case, dtype: torch.dtype, queries: int | None, with_lse: bool
) -> list[str]:
    inputs = random_inputs(case, dtype).map(Tensor.cuda)
    q, k, v = inputs.of(branch)
    q_start = None
    if queries is not None:
        q = q[:, :queries].contiguous()
        starts = [(case.length - queries) * b // max(case.batch - 1, 1) for b in range(case.batch)]
        q_start = torch.tensor(starts, dtype=torch.int32, device="cuda")
    options = hyperparameters(branch, case, q_start=q_start)
    found = by_backend(backend, branch, (q, k, v), case, q_start, with_lse=with_lse)
    exact = by_reference(branch, (q.double(), k.double(), v.double()), with_lse=with_lse, **options)
    plain = by_reference(branch, (q, k, v), with_lse=with_lse, **options)
    return too_far(found, exact, plain, case)


def shapes(count: int) -> Iterator[tuple[int, str, Case, torch.dtype, int | None]]:
    """`count` supported problems: the compressed branch takes one query of a cache at a time."""
    seed = made = 0
    while made < count:
        case, dtype, queries = random_case(seed)
        branch = ("compressed", "sliding")[seed % 2]
        seed += 1
        # A cache of unequal or odd head dims would have to be copied at every step.
        if queries is not None and (case.d_k != case.d_v or case.d_k % 8):
            continue
        if branch == "compressed" and queries is not None and queries > 1:
            continue
        made += 1
        yield seed - 1, branch, case, dtype, queries


def run(library: Library, count: int) -> Counter[str]:
    """Check them all; failures are printed at once, the counts at the end."""
    backend = backend_of(library)
    counts: Counter[str] = Counter()
    for seed, branch, case, dtype, queries in shapes(count):
        layout = "cached" if queries else "varlen" if case.documents else "fixed"
        print(f"{seed} {branch} {layout} {str(dtype).removeprefix('torch.')} {case} queries={queries}", flush=True)
        try:
            wrong = check(backend, branch, case, dtype, queries, with_lse=seed % 4 == 0)
        except RuntimeError as error:
            wrong = [f"{type(error).__name__}: {error}"]
        for sentence in wrong:
            print(f"  WRONG {sentence}", flush=True)
        counts[f"{branch} {layout}"] += 1
        counts["failed" if wrong else "right"] += 1
    print(f"{library.contract.library} {library.version} on {torch.cuda.get_device_name()}, {count} shapes")
    for name, number in sorted(counts.items()):
        print(f"  {name:<20} {number}")
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--library", default="torch", help="torch, or flash_attn where it is installed")
    args = parser.parse_args()
    named = {library.contract.library: library for library in find_libraries()[0]}
    sys.exit(run(named[args.library], args.count)["failed"] > 0)
