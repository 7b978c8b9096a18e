"""A stand-in for a FlashAttention library in plain torch: for argument marshalling and fault injection only.

It behaves as a kernel would: rows that no sequence owns come out as NaN, and a backward pass uses the `o` and `lse` it
is given. The faulty ones do what native code does when it goes wrong.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nsa.backends.flash.contracts import HALF, TORCH, Call, Contract

CPU_CONTRACT = replace(TORCH, library="stand-in", device="cpu", dtypes=(*HALF, torch.float32), capabilities=(0,))


def segments(call: Call) -> list[tuple[int, int, int, int]]:
    """The first row and the end of `q` and of `k` of every sequence, in flattened rows."""
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        batch, n_queries, n_keys = call.q.shape[0], call.q.shape[1], call.k.shape[1]
        return [(b * n_queries, (b + 1) * n_queries, b * n_keys, (b + 1) * n_keys) for b in range(batch)]
    q_pairs, k_pairs = (list(pairwise(x.tolist())) for x in (call.cu_seqlens_q, call.cu_seqlens_k))
    used = call.used_k.tolist() if call.used_k is not None else [b - a for a, b in k_pairs]
    # What no kernel checks: offsets inside of the rows, no length above its bound, no query before the first key.
    for (q0, q1), (k0, k1), n in zip(q_pairs, k_pairs, used, strict=True):
        assert 0 <= q0 <= q1 <= call.q.shape[0]
        assert 0 <= k0 <= k0 + n <= k1 <= call.k.shape[0]
        assert q1 - q0 <= (call.max_q or 0)
        assert n <= (call.max_k or 0)
        assert n >= q1 - q0 or not call.causal
    return [(*q, k[0], k[0] + n) for q, k, n in zip(q_pairs, k_pairs, used, strict=True)]


def flat(x: Tensor, varlen: bool) -> Tensor:
    return x if varlen else x.flatten(0, 1)


def scores_of(call: Call, q: Tensor, k: Tensor) -> Tensor:
    """`[heads, queries, keys]`; the mask ends at the last query and the last key."""
    n_queries, n_keys = q.shape[0], k.shape[0]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * call.scale
    for i in range(n_queries):
        last = i + n_keys - n_queries
        if call.causal:
            scores[:, i, max(last + 1, 0) :] = -torch.inf
        if call.window is not None:
            scores[:, i, : max(last + 1 - call.window, 0)] = -torch.inf
    return scores


@dataclass
class StandIn:
    version: str = "0"
    contract: Contract = CPU_CONTRACT
    address: str = f"{__name__}:StandIn"
    calls: list[Call] = field(default_factory=list)

    def obstacle(self) -> str | None:
        return None

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        self.calls.append(call)
        q, k, v = (flat(x, call.varlen) for x in (call.q, call.k, call.v))
        o = torch.full((*q.shape[:2], v.shape[2]), torch.nan, dtype=torch.float64)
        lse = torch.full(q.shape[:2], torch.nan, dtype=torch.float64)
        for q0, q1, k0, k1 in segments(call):
            if q1 == q0:
                continue
            if k1 == k0:
                # As the kernels do: zero, and an LSE that is infinite the other way.
                o[q0:q1], lse[q0:q1] = 0.0, torch.inf
                continue
            scores = scores_of(call, q[q0:q1], k[k0:k1])
            values = v[k0:k1].double().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
            o[q0:q1] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values)
            lse[q0:q1] = scores.logsumexp(dim=-1).T
        o, lse = o.to(q.dtype), lse.float()
        if call.varlen:
            return o, lse.T.contiguous()
        return o.view(*call.q.shape[:3], -1), lse.view(call.q.shape[:3]).transpose(1, 2).contiguous()

    def backward(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append(call)
        assert call.do is not None
        assert call.o is not None
        assert call.lse is not None
        q, k, v, do, o = (flat(x, call.varlen).double() for x in (call.q, call.k, call.v, call.do, call.o))
        lse = (call.lse if call.varlen else call.lse.transpose(0, 1).flatten(1)).double()
        groups = k.shape[1]
        dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
        for q0, q1, k0, k1 in segments(call):
            if q1 == q0 or k1 == k0:
                dq[q0:q1], dk[k0:k1], dv[k0:k1] = 0.0, 0.0, 0.0
                continue
            scores = scores_of(call, q[q0:q1], k[k0:k1])
            p = (scores - lse[:, q0:q1, None]).exp()
            per = q.shape[1] // groups
            keys, values = (x[k0:k1].repeat_interleave(per, dim=1) for x in (k, v))
            dp = torch.einsum("qhd,khd->hqk", do[q0:q1], values)
            delta = (do[q0:q1] * o[q0:q1]).sum(dim=-1).T[..., None]
            ds = p * (dp - delta) * call.scale
            dq[q0:q1] = torch.einsum("hqk,khd->qhd", ds, keys)
            dk[k0:k1] = torch.einsum("hqk,qhd->khd", ds, q[q0:q1]).unflatten(1, (groups, per)).sum(dim=2)
            dv[k0:k1] = torch.einsum("hqk,qhd->khd", p, do[q0:q1]).unflatten(1, (groups, per)).sum(dim=2)
        found = ((dq, call.q), (dk, call.k), (dv, call.v))
        dq, dk, dv = (x.view(like.shape).to(like.dtype) for x, like in found)
        return dq, dk, dv


def long_sequence(call: Call) -> bool:
    """Fixed-length, and more than one token."""
    return not call.varlen and call.q.shape[1] > 1


def faulty(
    name: str, act: Callable[[], Any], when: Callable[[Call], bool] = long_sequence, direction: str = "forward"
) -> Any:
    """A stand-in that does `act` before the calls of one direction for which `when` holds."""

    def run(self: StandIn, call: Call) -> Any:
        if when(call):
            act()
        return getattr(StandIn, direction)(self, call)

    members = {"__annotations__": {"address": str}, "address": f"{__name__}:{name}", direction: run}
    return dataclass(type(name, (StandIn,), {**members, "__module__": __name__}))


def raise_error() -> None:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


def kill(number: int = signal.SIGFPE) -> None:
    os.kill(os.getpid(), number)


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def print_odd_bytes() -> None:
    os.write(1, b"\xff\xfe\x80\n")
    os.write(2, b"\xff\xfe\x80 crash\n")
    # A real-time signal without a name.
    kill(40)


def print_for_ever() -> None:
    """So does a child of its own, whose number is in the file that `OFFSPRING` names."""
    offspring = os.fork()
    if offspring:
        with open(os.environ["OFFSPRING"], "w") as file:
            file.write(str(offspring))
    while True:
        for output in (1, 2):
            os.write(output, b"waiting for the GPU...\n" * 1000)
        time.sleep(0.01)


Raising = faulty("Raising", raise_error)
Segfaulting = faulty("Segfaulting", lambda: ctypes.string_at(0))
FloatingPointException = faulty("FloatingPointException", kill)
Hanging = faulty("Hanging", lambda: time.sleep(3600))
LongFault = faulty("LongFault", kill, lambda call: not call.varlen and call.q.shape[1] >= 300)
BatchFault = faulty("BatchFault", kill, lambda call: not call.varlen and call.q.shape[0] > 1)
WindowFault = faulty("WindowFault", kill, lambda call: call.window == 33)
VarlenBackwardFault = faulty("VarlenBackwardFault", kill, lambda call: call.varlen, "backward")
BackwardRaising = faulty("BackwardRaising", raise_error, lambda call: True, "backward")
BackwardDying = faulty("BackwardDying", kill, lambda call: True, "backward")
OddBytes = faulty("OddBytes", print_odd_bytes)
TalkingHang = faulty("TalkingHang", print_for_ever)
Full = faulty("Full", run_out_of_memory)


@dataclass
class NotFinite(StandIn):
    address: str = f"{__name__}:NotFinite"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        o, lse = super().forward(call)
        return o * torch.nan, lse


@dataclass
class WrongKeys(StandIn):
    """Sees all keys, and prints what looks like a right answer."""

    address: str = f"{__name__}:WrongKeys"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        if call.q.shape[-3] == 1:
            return super().forward(call)
        os.write(1, b'note {"problem": null}\n{"case": "a window across tiles", "problem": null}\n note')
        return super().forward(replace(call, causal=False, window=None))


@dataclass
class LongWindow(StandIn):
    """Counts a window without the query itself: one key too many."""

    address: str = f"{__name__}:LongWindow"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        return super().forward(call if call.window is None else replace(call, window=call.window + 1))


def dies_when_loaded() -> StandIn:
    kill(signal.SIGSEGV)
    raise AssertionError("the process should be gone")


CannotBeLoaded = StandIn(address=f"{__name__}:no_such_name")
DyingWhenLoaded = StandIn(address=f"{__name__}:dies_when_loaded")
# One of each kind: an exception, wrong results, a crash, no answer.
FAULTS = (Raising, WrongKeys, Segfaulting, Hanging)
