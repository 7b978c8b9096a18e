"""The child of a probe: `python -m nsa.backends.flash.trial ADDRESS DEVICE`, one JSON case a line on its input.

Each case is a call that a branch makes, forward and backward, held against the same attention written out in fp32. A
result that is not finite or not right is a sentence; a crash is for the parent to see.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nsa.backends.contracts import Call, value_violations
from nsa.backends.flash.libraries import Library, load, refusals
from nsa.backends.probe import RESTART
from nsa.backends.problem import Problem

# How far a result may be off, in roundings of the largest value: enough for any order of sums, not for a wrong key.
ROUNDINGS = 16
# Queries that the compressed branch puts side by side as heads, in the paper's configuration.
FOLDED = 16


def kind_of(problem: Problem, width: int, dtype: torch.dtype) -> str:
    """Problems of one kind make the same calls on other lengths: they share a verdict."""
    return f"{str(dtype).removeprefix('torch.')}-d{width}-h{problem.n_heads}/{problem.n_groups}"


def cases_of(problem: Problem, width: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Lengths on both sides of tiles, one token, a window longer than the sequence, documents without a token."""
    shared = {"width": width, "groups": problem.n_groups, "dtype": str(dtype).removeprefix("torch.")}
    few = {**shared, "heads": problem.n_heads}
    many = {**shared, "heads": problem.n_heads * FOLDED}

    def case(name: str, feature: str, sizes: Mapping[str, Any], lengths: Sequence[int], **rest: Any) -> dict[str, Any]:
        given = {"name": name, "feature": feature, "backward": feature != "cached", "window": None, **rest}
        return {**given, **sizes, "lengths": list(lengths)}

    return [
        case("one token", "dense", few, [1], window=4),
        case("a window across tiles", "dense", few, [257], window=100),
        case("a window longer than the sequence", "dense", few, [129], window=512),
        case("folded heads", "dense", many, [65]),
        case("documents", "packed", few, [1, 130, 37], window=100),
        case("empty documents", "packed", few, [0, 5, 0, 64, 0], window=16),
        case("folded documents", "packed", many, [3, 0, 40]),
        case("one query on a cache", "cached", few, [7, 300], queries=1),
        case("a few queries on a cache", "cached", few, [7, 300], queries=5, window=64),
        case("a cache without a key yet", "cached", few, [0, 33], queries=1),
    ]


def make_call(case: Mapping[str, Any], device: str) -> Call:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case["dtype"])

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    heads, groups, width, lengths = (case[name] for name in ("heads", "groups", "width", "lengths"))
    shared: dict[str, Any] = {"scale": width**-0.5, "window": case["window"]}
    if case["feature"] == "dense":
        q, k, v = (
            draw(1, lengths[0], heads, width),
            draw(1, lengths[0], groups, width),
            draw(1, lengths[0], groups, width),
        )
        return Call(q=q, k=k, v=v, **shared)
    if case["feature"] == "packed":
        offsets = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
        total, longest = sum(lengths), max(*lengths, 2)
        q, k, v = draw(total, heads, width), draw(total, groups, width), draw(total, groups, width)
        limits = {"max_q": longest, "max_k": longest}
        return Call(q=q, k=k, v=v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **limits, **shared)
    # Each row of a cache has room for the longest and more.
    queries, room = case["queries"], max(lengths) + 11
    starts = torch.arange(len(lengths) + 1).int().to(device)
    q = draw(len(lengths) * queries, heads, width)
    k, v = draw(len(lengths) * room, groups, width), draw(len(lengths) * room, groups, width)
    return Call(
        q=q,
        k=k,
        v=v,
        causal=case["window"] is not None,
        cu_seqlens_q=starts * queries,
        cu_seqlens_k=starts * room,
        used_k=torch.tensor(lengths).int().to(device),
        max_q=queries,
        max_k=room,
        **shared,
    )


def sequences(call: Call) -> list[tuple[slice, slice]]:
    """Rows of q and of k that belong together."""
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        return [(slice(0, call.q.shape[1]), slice(0, call.k.shape[1]))]
    q_ranges = [slice(a, b) for a, b in pairwise(call.cu_seqlens_q.tolist())]
    k_ranges = [slice(a, b) for a, b in pairwise(call.cu_seqlens_k.tolist())]
    if call.used_k is not None:
        k_ranges = [slice(r.start, r.start + n) for r, n in zip(k_ranges, call.used_k.tolist(), strict=True)]
    return list(zip(q_ranges, k_ranges, strict=True))


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence `[rows, heads, width]`, written out: scores, mask, softmax."""
    n_queries, (n_keys, groups) = q.shape[0], k.shape[:2]
    scores = torch.einsum("qghd,kgd->ghqk", q.unflatten(1, (groups, -1)), k) * call.scale
    ahead = (
        torch.arange(n_keys, device=q.device) - torch.arange(n_queries, device=q.device)[:, None] - (n_keys - n_queries)
    )
    hidden = (ahead > 0) & call.causal
    if call.window is not None:
        hidden |= ahead <= -call.window
    scores = scores.masked_fill(hidden, float("-inf"))
    o = torch.einsum("ghqk,kgd->qghd", scores.softmax(dim=-1), v)
    return o.flatten(1, 2), scores.logsumexp(dim=-1).flatten(0, 1)


def written_out(call: Call, do: Tensor | None) -> dict[str, Tensor]:
    """What the library should give, in fp32: `o`, `lse` as `[rows, heads]`, and gradients where `do` is given."""
    flat = [x[0] if not call.varlen else x for x in (call.q, call.k, call.v)]
    leaves = [x.detach().float().requires_grad_(do is not None) for x in flat]
    q, k, v = leaves
    o, lse = torch.zeros_like(q), torch.full(q.shape[:2], float("-inf"), device=q.device)
    for rows, keys in sequences(call):
        if rows.stop > rows.start and keys.stop > keys.start:
            part, normaliser = attend(call, q[rows], k[keys], v[keys])
            o = o.index_copy(0, torch.arange(rows.start, rows.stop, device=q.device), part)
            lse[rows] = normaliser.detach().T
    found = {"o": o.detach(), "lse": lse}
    if do is not None:
        gradients = torch.autograd.grad(o, leaves, (do if call.varlen else do[0]).float())
        found |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return found


def try_case(library: Library, case: Mapping[str, Any], call: Call) -> str | None:
    """None when the library's results are right, else what is wrong."""
    broken = [*refusals(library, call), *value_violations(call, library.contract)]
    if broken:
        return "; ".join(broken)
    o, lse = library.forward(call)
    rows = lse.T if call.varlen else lse[0].T
    found = {"o": o if call.varlen else o[0], "lse": rows}
    do = None
    if case["backward"]:
        generator = torch.Generator().manual_seed(1)
        do = torch.randn(o.shape, generator=generator).to(o)
        gradients = library.backward(replace(call, do=do, o=o, lse=lse.contiguous()))
        found |= {name: x if call.varlen else x[0] for name, x in zip(("dq", "dk", "dv"), gradients, strict=True)}
    for name, expected in written_out(call, do).items():
        # A row without a key has no normaliser worth comparing: branches set it themselves.
        seen = expected.isfinite()
        got = found[name].float().where(seen, 0.0)
        if got.shape != expected.shape:
            return f"{name} has shape {tuple(got.shape)}, not {tuple(expected.shape)}"
        if not bool(got.isfinite().all()):
            return f"{name} is not finite"
        expected = expected.where(seen, 0.0)
        off, size = float((got - expected).abs().max()), float(expected.abs().max())
        allowed = ROUNDINGS * torch.finfo(call.q.dtype).eps * max(size, 1.0)
        if off > allowed:
            return f"{name} is off by {off:.3g}, allowed {allowed:.3g}"
    return None


def answer(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main(address: str, device: str) -> None:
    try:
        library = load(address)
    except (ImportError, RuntimeError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    for line in sys.stdin:
        case = json.loads(line)
        call = make_call(case, device)
        answer(call=f"{call} on {device}")
        try:
            problem = try_case(library, case, call)
            if device.startswith("cuda"):
                torch.cuda.synchronize()
        except (ImportError, RuntimeError, TypeError) as error:
            answer(problem=f"{type(error).__name__}: {error}")
            # After an illegal access nothing else runs on this GPU in this process.
            sys.exit(RESTART)
        answer(problem=problem)


if __name__ == "__main__":
    main(*sys.argv[1:])
