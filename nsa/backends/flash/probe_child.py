"""The child of a probe: `python -m nsa.backends.flash.probe_child ADDRESS DEVICE ANSWERS`, with one JSON case per line
on its standard input.

Each case is a call that a branch makes, forward and backward, compared with the same attention in plain torch in a
wider dtype. A wrong result is reported in words; a crash is for the parent to see. Answers go to a file, because a
library may print what it likes. The package must not import this module, or `python -m` would load it twice.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from nsa.backends.flash.cases import make_call
from nsa.backends.flash.contracts import Call
from nsa.backends.flash.libraries import LIBRARY_ERRORS, Library, reasons_against
from nsa.backends.flash.probe import CASE_SECONDS, START_SECONDS, STOPPED, shown_list

# Tolerance, in roundings of the largest value: enough for any order of sums, and too little for a wrong key among the
# few of a short window.
ROUNDINGS = 16
# Scores and queries of the comparison that are computed at once.
TILE_SCORES = 2**25
TILE_QUERIES = 1024
# How much longer than its parent the child waits before it ends itself.
MARGIN_SECONDS = 10.0
LOADING = "loading the library"
CHILD_STDERR = 2


def flat_rows(call: Call, x: Tensor) -> Tensor:
    """`[rows, heads, head_dim]`, whichever layout the call has."""
    return x if call.varlen else x.flatten(0, 1)


def sequences(call: Call) -> list[tuple[slice, slice]]:
    """The rows of q and of k of each sequence."""

    def rows(offsets: Tensor | None, x: Tensor) -> list[slice]:
        ends = range(0, x.shape[0] * x.shape[1] + 1, x.shape[1]) if offsets is None else offsets.tolist()
        return [slice(a, b) for a, b in pairwise(ends)]

    queries, keys = rows(call.cu_seqlens_q, call.q), rows(call.cu_seqlens_k, call.k)
    if call.used_k is not None:
        keys = [slice(r.start, r.start + n) for r, n in zip(keys, call.used_k.tolist(), strict=True)]
    return list(zip(queries, keys, strict=True))


def tiles(call: Call, rows: slice, keys: slice) -> Iterator[tuple[slice, slice]]:
    """A sequence, a few queries at a time, with the keys that they may see; the last of both still belong together."""
    n_keys = keys.stop - keys.start
    span = n_keys if call.window is None else min(n_keys, call.window + TILE_QUERIES)
    step = max(1, min(TILE_QUERIES, TILE_SCORES // max(1, call.q.shape[-2] * span)))
    ahead = keys.stop - rows.stop
    for start in range(rows.start, rows.stop, step):
        stop = min(start + step, rows.stop)
        end = ahead + stop if call.causal else keys.stop
        first = keys.start if call.window is None else max(keys.start, ahead + start + 1 - call.window)
        if end > first:
            yield slice(start, stop), slice(first, end)


def attend_tile(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`o [rows, heads, head_dim]` and `lse [heads, rows]` of one tile in plain torch."""
    n_queries, (n_keys, groups) = q.shape[0], k.shape[:2]
    scores = torch.einsum("qghd,kgd->ghqk", q.unflatten(1, (groups, -1)), k) * call.scale
    query = torch.arange(n_queries, device=q.device)[:, None] + n_keys - n_queries
    ahead = torch.arange(n_keys, device=q.device) - query
    hidden = (ahead > 0) & call.causal
    if call.window is not None:
        hidden |= ahead <= -call.window
    scores = scores.masked_fill(hidden, float("-inf"))
    o = torch.einsum("ghqk,kgd->qghd", scores.softmax(dim=-1), v)
    return o.flatten(1, 2), scores.logsumexp(dim=-1).flatten(0, 1)


def expected_results(call: Call, do: Tensor | None) -> dict[str, Tensor]:
    """The results that the library should return, `[rows, heads, ...]`: `o`, `lse`, and the gradients for a given
    `do`."""
    wide = torch.float64 if call.q.dtype == torch.float32 else torch.float32
    q, k, v = (flat_rows(call, x).to(wide) for x in (call.q, call.k, call.v))
    found = {"o": torch.zeros_like(q), "lse": q.new_full(q.shape[:2], float("-inf"))}
    if do is not None:
        do = flat_rows(call, do).to(wide)
        found |= {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    for sequence in sequences(call):
        for rows, keys in tiles(call, *sequence):
            leaves = [x.detach().requires_grad_(do is not None) for x in (q[rows], k[keys], v[keys])]
            o, lse = attend_tile(call, *leaves)
            found["o"][rows], found["lse"][rows] = o.detach(), lse.detach().T
            if do is not None:
                dq, dk, dv = torch.autograd.grad(o, leaves, do[rows])
                for name, own, x in (("dq", rows, dq), ("dk", keys, dk), ("dv", keys, dv)):
                    found[name][own] += x
    return found


def compute(
    library: Library, call: Call, *, backward: bool, begin: Callable[[str, Call], bool]
) -> tuple[dict[str, Tensor], Tensor | None]:
    """The library's results, `[rows, heads, ...]`, and the `do` of its gradients. `begin` is called before each call;
    a backward pass is left out if it returns False."""
    begin("forward", call)
    o, lse = library.forward(call)
    synchronize(call)
    found = {"o": flat_rows(call, o), "lse": lse.T if call.varlen else lse.transpose(1, 2).flatten(0, 1)}
    if not backward or o.shape != call.q.shape:
        return found, None
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    pull = replace(call, do=do, o=o.contiguous(), lse=lse.contiguous())
    if not begin("backward", pull):
        return found, None
    gradients = zip(("dq", "dk", "dv"), library.backward(pull), strict=True)
    synchronize(call)
    return found | {name: flat_rows(call, x) for name, x in gradients}, do


def synchronize(call: Call) -> None:
    """A kernel's fault appears when it is waited for: here, not in the next call."""
    if call.q.is_cuda:
        torch.cuda.synchronize()


def difference(call: Call, found: Mapping[str, Tensor], do: Tensor | None) -> str | None:
    """Describe what is wrong with the results; None if they are right."""
    for name, expected in expected_results(call, do).items():
        if found[name].shape != expected.shape:
            return f"{name} has shape {tuple(found[name].shape)}, not {tuple(expected.shape)}"
        dtype = torch.float32 if name == "lse" else call.q.dtype
        if found[name].dtype != dtype:
            return f"{name} is {found[name].dtype}, not {dtype}"
        # The LSE of a row without keys is not compared: the branches set it themselves.
        seen = expected.isfinite()
        got = found[name].to(expected.dtype).where(seen, 0.0)
        if not bool(got.isfinite().all()):
            return f"{name} is not finite"
        expected = expected.where(seen, 0.0)
        off, size = float((got - expected).abs().max()), float(expected.abs().max())
        allowed = ROUNDINGS * torch.finfo(call.q.dtype).eps * max(size, 1.0)
        if off > allowed:
            return f"{name} is off by {off:.3g}, allowed {allowed:.3g}"
    return None


def end_after(seconds: float) -> None:
    """End this process unless called again by then: nothing else would if the parent was killed."""
    # A watchdog outside of the interpreter, which a hanging library may hold.
    faulthandler.dump_traceback_later(seconds, exit=True, file=CHILD_STDERR)


@dataclass
class Answers:
    """The file of answers to the parent, each with the name of its case; `stage`: how far that case has got."""

    path: str
    case: str = ""
    stage: str = ""

    def write(self, **fields: Any) -> None:
        end_after(CASE_SECONDS + MARGIN_SECONDS)
        # Opened each time: no descriptor is left open for a library to write to.
        with open(self.path, "a", encoding="ascii") as file:
            file.write(json.dumps({"case": self.case, **fields}) + "\n")

    def begin(self, stage: str, call: str = "") -> None:
        self.stage = stage
        self.write(stage=stage, call=call)


def run_case(library: Library, case: Mapping[str, Any], device: str, answers: Answers) -> str | None:
    """Run a case and describe what is wrong with the library's results; None if they are right."""

    def described(given: Call) -> str:
        """The call as text, with the values of its offsets, for the report."""
        offsets = {"cu_seqlens_q": given.cu_seqlens_q, "cu_seqlens_k": given.cu_seqlens_k, "used_k": given.used_k}
        values = [f"{name}={shown_list(x.tolist())}" for name, x in offsets.items() if x is not None]
        return " ".join([str(given), *values, "on", device])

    def begin(direction: str, given: Call) -> bool:
        # A gradient may need more than its forward pass; no branch makes a call that the contract forbids.
        if reasons_against(library, given):
            return False
        answers.begin(direction, f"{direction}: {described(given)}")
        return True

    answers.begin("making the call")
    call = make_call(case, device)
    forbidden = reasons_against(library, call)
    if forbidden:
        return "; ".join(forbidden)
    found, do = compute(library, call, backward=case["backward"], begin=begin)
    answers.begin("the comparison", described(call))
    return difference(call, found, do)


def load_library(address: str) -> Library:
    """The library at an `address` that the parent passed on."""
    return resolve_name(address)()


def main(address: str, device: str, path: str) -> None:
    try:
        run_all(address, device, Answers(path))
    finally:
        faulthandler.cancel_dump_traceback_later()


def run_all(address: str, device: str, answers: Answers) -> None:
    end_after(START_SECONDS + MARGIN_SECONDS)
    try:
        # A GPU context takes seconds, which belong to the start; failing to get one is not the library's fault.
        torch.zeros(1, device=device)
        answers.begin(LOADING)
        end_after(START_SECONDS + MARGIN_SECONDS)
        library = load_library(address)
    except LIBRARY_ERRORS as error:
        sys.exit(f"{type(error).__name__}: {error}")
    for line in sys.stdin.read().splitlines():
        case = json.loads(line)
        answers.case = case["name"]
        try:
            answers.write(problem=run_case(library, case, device, answers))
        except (*LIBRARY_ERRORS, MemoryError) as error:
            # Full memory says nothing about the library.
            full = isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error)
            answers.write(problem=f"{type(error).__name__} in {answers.stage}: {error}", transient=full)
            # After an illegal access nothing else runs on this GPU in this process.
            if isinstance(error, RuntimeError):
                sys.exit(STOPPED)


if __name__ == "__main__":
    main(*sys.argv[1:])
