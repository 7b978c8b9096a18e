"""A stand-in for a FlashAttention library in plain torch: for argument marshalling and fault injection only.

It obeys the contract as a kernel would: nothing is computed for rows that no sequence owns, which come out as NaN, and
a backward pass uses the `o` and `lse` it is given. The faulty ones do what native code does when it goes wrong.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from nsa.backends.contracts import TORCH, Call, Contract

HALF = (torch.float16, torch.bfloat16)
CPU_CONTRACT = replace(TORCH, library="stand-in", device="cpu", dtypes=(*HALF, torch.float32), capabilities=(0,))


def segments(call: Call) -> list[tuple[int, int, int, int]]:
    """`q` from, to, `k` from, to of every sequence, in flattened rows."""
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        batch, n_queries, n_keys = call.q.shape[0], call.q.shape[1], call.k.shape[1]
        return [(b * n_queries, (b + 1) * n_queries, b * n_keys, (b + 1) * n_keys) for b in range(batch)]
    q_pairs, k_pairs = (list(pairwise(x.tolist())) for x in (call.cu_seqlens_q, call.cu_seqlens_k))
    used = call.used_k.tolist() if call.used_k is not None else [b - a for a, b in k_pairs]
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
                # As the kernels do: nothing, and a normaliser that is infinite the other way.
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


@dataclass
class Faulty(StandIn):
    """Right on a single token and on documents, wrong on a plain sequence, in its own way."""

    def fail(self) -> None:
        raise NotImplementedError

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        if not call.varlen and call.q.shape[1] > 1:
            self.fail()
        return super().forward(call)


@dataclass
class Raising(Faulty):
    address: str = f"{__name__}:Raising"

    def fail(self) -> None:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


@dataclass
class NotFinite(StandIn):
    address: str = f"{__name__}:NotFinite"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        o, lse = super().forward(call)
        return o * torch.nan, lse


@dataclass
class WrongKeys(StandIn):
    """Looks one key ahead."""

    address: str = f"{__name__}:WrongKeys"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        return super().forward(replace(call, causal=False, window=None))


@dataclass
class LongWindow(StandIn):
    """Takes a window for the keys before the query, its own not counted: one too many."""

    address: str = f"{__name__}:LongWindow"

    def longer(self, call: Call) -> Call:
        return call if call.window is None else replace(call, window=call.window + 1)

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        return super().forward(self.longer(call))

    def backward(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        return super().backward(self.longer(call))


@dataclass
class Segfaulting(Faulty):
    address: str = f"{__name__}:Segfaulting"

    def fail(self) -> None:
        ctypes.string_at(0)


@dataclass
class FloatingPointException(Faulty):
    address: str = f"{__name__}:FloatingPointException"

    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGFPE)


@dataclass
class Hanging(Faulty):
    address: str = f"{__name__}:Hanging"

    def fail(self) -> None:
        time.sleep(3600)


@dataclass
class CannotBeLoaded(StandIn):
    address: str = f"{__name__}:no_such_name"


def dies_when_loaded() -> StandIn:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("the process should be gone")


@dataclass
class DyingWhenLoaded(StandIn):
    """Takes its process along before the first call."""

    address: str = f"{__name__}:dies_when_loaded"


@dataclass
class LongFault(StandIn):
    """Dies on plain sequences from 300 tokens on."""

    address: str = f"{__name__}:LongFault"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        if not call.varlen and call.q.shape[1] >= 300:
            os.kill(os.getpid(), signal.SIGFPE)
        return super().forward(call)


@dataclass
class BatchFault(StandIn):
    """Dies on several rows."""

    address: str = f"{__name__}:BatchFault"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        if not call.varlen and call.q.shape[0] > 1:
            os.kill(os.getpid(), signal.SIGFPE)
        return super().forward(call)


@dataclass
class WindowFault(StandIn):
    """Dies on one window that no case but the problem's own has."""

    address: str = f"{__name__}:WindowFault"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        if call.window == 33:
            os.kill(os.getpid(), signal.SIGFPE)
        return super().forward(call)


@dataclass
class BackwardFault(StandIn):
    """Right forward, dies backward on documents."""

    address: str = f"{__name__}:BackwardFault"

    def backward(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        if call.varlen:
            os.kill(os.getpid(), signal.SIGFPE)
        return super().backward(call)


@dataclass
class BackwardRaising(StandIn):
    """Right forward, refuses every backward pass."""

    def backward(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


@dataclass
class BackwardDying(StandIn):
    """Right forward, takes its process along in every backward pass."""

    address: str = f"{__name__}:BackwardDying"

    def backward(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        os.kill(os.getpid(), signal.SIGFPE)
        raise AssertionError("the process should be gone")


@dataclass
class WrongAndTalking(StandIn):
    """Looks at wrong keys on plain sequences, and prints no newline; the note is an answer's look-alike."""

    address: str = f"{__name__}:WrongAndTalking"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        if call.varlen or call.q.shape[1] == 1:
            return super().forward(call)
        os.write(1, b'note {"problem": null}\n{"case": "a window across tiles", "problem": null}\n note')
        return super().forward(replace(call, causal=False, window=None))


@dataclass
class OddBytes(Faulty):
    address: str = f"{__name__}:OddBytes"

    def fail(self) -> None:
        os.write(1, b"\xff\xfe\x80\n")
        os.write(2, b"\xff\xfe\x80 crash\n")
        # A real-time signal without a name.
        os.kill(os.getpid(), 40)


@dataclass
class TalkingHang(Faulty):
    """Prints for ever, and so does a child of its own, whose number is in the file that `OFFSPRING` names."""

    address: str = f"{__name__}:TalkingHang"

    def fail(self) -> None:
        offspring = os.fork()
        if offspring:
            with open(os.environ["OFFSPRING"], "w") as file:
                file.write(str(offspring))
        while True:
            os.write(1, b"waiting for the GPU...\n" * 1000)
            os.write(2, b"waiting for the GPU...\n" * 1000)
            time.sleep(0.01)


@dataclass
class Full(Faulty):
    address: str = f"{__name__}:Full"

    def fail(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")


def loaded_once() -> StandIn:
    """Can be loaded by the first child only, which dies."""
    path = os.environ["LOADED"]
    if os.path.exists(path):
        raise ImportError("the GPU is in exclusive mode")
    with open(path, "w"):
        return FloatingPointException()


@dataclass
class LoadedOnce(StandIn):
    address: str = f"{__name__}:loaded_once"


FAULTS = (Raising, NotFinite, WrongKeys, Segfaulting, FloatingPointException, Hanging)
