"""The backend as the router sees it: which library serves a problem, or why none does."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.backends import policy
from nsa.backends.contracts import limits, rows_in_tiles
from nsa.backends.flash.branches import (
    NEGATIVE_INFINITY,
    Plan,
    attend,
    common_width,
    compressed_plan,
    gradients,
    sliding_plan,
)
from nsa.backends.flash.cases import CODE, USUAL, Posed, cases_of, kind_of, posed
from nsa.backends.flash.libraries import Library, find_libraries
from nsa.backends.gated import without_gate
from nsa.backends.probe import Outcome, Subject, Verdicts, cache_folder, report, run_cases
from nsa.backends.problem import Problem
from nsa.backends.routing import CallRefused, Fault
from nsa.geometry import n_compressed
from nsa.sequences import Compressed, Saved, Sequences, Sliding, Upstream
from nsa.settings import Settings

log = logging.getLogger("nsa")

# A kind of problem that was never tried here is tried by this: the cases go to a child, its verdicts come back.
Prober = Callable[[Library, Posed, int, torch.dtype], list[Outcome]]


def probe_in_child(library: Library, problem: Posed, width: int, dtype: torch.dtype) -> list[Outcome]:
    device = f"cuda:{torch.cuda.current_device()}" if problem.device == "cuda" else problem.device
    # Where Python is embedded it may not know its own path; no child starts then. `-P`: the working directory may hold
    # modules of the same names as those that the child needs.
    command = [sys.executable or "", "-P", "-m", "nsa.backends.flash.trial", library.address, device]
    return run_cases(command, cases_of(problem, width, dtype))


@dataclass
class FlashBackend:
    """`libraries` in the order they are tried; `absent`: why not the others. Verdicts are kept in `folder`."""

    config: Settings
    libraries: tuple[Library, ...]
    absent: dict[str, str] = field(default_factory=dict)
    folder: Path | None = field(default_factory=cache_folder)
    prober: Prober = probe_in_child
    name: str = "flash"
    # What this process has found out: a decision costs a look-up, a cast is said once.
    tried: dict[tuple[Subject, str], list[Outcome]] = field(default_factory=dict, repr=False)
    serving: dict[tuple[object, ...], Library] = field(default_factory=dict, repr=False)
    said_cast: bool = False

    def available(self) -> str | None:
        """None where something can be served at all."""
        flags = policy.flags(self.config)
        if all(flag.state == "off" for flag in flags.values()):
            return next(iter(flags.values())).why
        devices = {library.contract.device for library in self.libraries}
        if devices <= {"cuda"} and not torch.cuda.is_available():
            return "no CUDA GPU"
        return None if self.libraries else "; ".join(self.absent.values())

    def supports(self, problem: Problem) -> str | None:
        found = self.choose(problem)
        return found if isinstance(found, str) else None

    def choose(self, problem: Problem) -> Library | str:
        """The library that serves, or every reason why none does. The first question of its kind may start a probe."""
        if problem.op not in policy.BRANCHES:
            return f"FlashAttention serves the compressed and the sliding branch, not {problem.op}"
        if problem.cached and problem.backward:
            return "a cache is not trained through"
        if problem.cached and problem.op == "compressed" and problem.n_queries > 1:
            return "several queries on the compressed keys of a cache start in the middle of a block"
        reasons = {}
        for library in self.libraries:
            reason = self.reason_against(library, problem)
            if reason is None:
                return library
            reasons[library.contract.library] = reason
        told = "; ".join([*(f"{name}: {reason}" for name, reason in reasons.items()), *self.absent.values()])
        return Fault(told) if any(isinstance(reason, Fault) for reason in reasons.values()) else told

    def reason_against(self, library: Library, problem: Problem) -> str | None:
        return self.forbids(library, problem) or self.verdict(library, posed(problem))

    def forbids(self, library: Library, problem: Problem) -> str | None:
        """What of the library's limits stands against the problem; None when nothing does."""
        if problem.device != library.contract.device:
            return f"it runs on {library.contract.device}, the tensors are on {problem.device}"
        obstacle = library.obstacle()
        if obstacle is not None:
            return obstacle
        width = self.width_of(library, problem)
        batch = 1 if problem.packed else problem.batch
        # A stride folds queries into heads. Before the call tells it, the sizes do; the call itself is held against the
        # limits when it is made.
        called = posed(problem, knob=likely_stride(problem))
        found = limits(
            library.contract,
            torch.cuda.get_device_capability() if problem.device == "cuda" else None,
            dtype=self.dtype_of(problem.dtype),
            d_k=width,
            d_v=width,
            n_heads=called.heads_called,
            n_groups=problem.n_groups,
            n_sequences=batch,
            tile_rows=rows_in_tiles(batch, called.length_called, varlen=problem.packed),
            backward=problem.backward,
        )
        return "; ".join(found) or None

    def width_of(self, library: Library, problem: Problem) -> int:
        return common_width(problem.d_k, problem.d_v, library.contract)

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """fp32 is cast only where the user asked for it."""
        return torch.float16 if dtype == torch.float32 and self.config.fa2_prefer_fp16 else dtype

    def verdict(self, library: Library, problem: Posed) -> str | None:
        """None when every case like this problem was right in the probe."""
        found = [x for x in self.outcomes(library, problem) if x.problem and x.feature == problem.feature]
        # A full GPU is no failure of the library's: it is told only where nothing else is.
        worst = min(found, key=lambda outcome: outcome.transient, default=None)
        if worst is None:
            return None
        reason = f"the probe's case {worst.case!r} {worst.problem} (nsa doctor --probe tries again)"
        return reason if worst.transient else Fault(reason)

    def outcomes(self, library: Library, problem: Posed) -> list[Outcome]:
        """From memory, from the user's cache, or from a child process, in this order."""
        verdicts, kind = self.verdicts(library), self.kind_of(library, problem)
        key = (verdicts.subject, kind)
        if key not in self.tried:
            found = verdicts.get(kind)
            if found is None:
                found = self.probe(library, problem)
            self.tried[key] = found
        return self.tried[key]

    def kind_of(self, library: Library, problem: Posed) -> str:
        return kind_of(problem, self.width_of(library, problem), self.dtype_of(problem.dtype))

    def probe(self, library: Library, problem: Posed) -> list[Outcome]:
        """Try now, whatever is remembered, and remember it."""
        verdicts, kind = self.verdicts(library), self.kind_of(library, problem)
        subject = verdicts.subject
        # A run stands still meanwhile, and whoever waits for it should know why.
        log.warning("nsa: probing %s %s on %s for %s, once", subject.library, subject.version, subject.gpu, kind)
        found = self.prober(library, problem, self.width_of(library, problem), self.dtype_of(problem.dtype))
        if any(outcome.problem for outcome in found):
            log.warning("nsa: %s", report(subject, found))
        # What says nothing about the library is asked again by the next process.
        if found and not any(outcome.transient for outcome in found):
            verdicts.put(kind, found)
        self.tried[subject, kind] = found
        self.serving.clear()
        return found

    def probe_all(
        self,
        problem: Problem,
        *,
        block: int = 2 * USUAL["compressed"],
        stride: int = USUAL["compressed"],
        window: int = USUAL["sliding"],
    ) -> list[tuple[Library, Subject, list[Outcome]]]:
        """Forget what was found and try every library on `problem`; those whose limits forbid it are left out."""
        found = []
        for library in self.libraries:
            asked = [
                part for part in branches_of(problem, block, stride, window) if self.forbids(library, part) is None
            ]
            if not asked:
                continue
            verdicts = self.verdicts(library)
            verdicts.forget()
            self.tried = {key: kept for key, kept in self.tried.items() if key[0] != verdicts.subject}
            outcomes = [outcome for part in asked for outcome in self.probe(library, part)]
            found.append((library, verdicts.subject, without_repeats(outcomes)))
        return found

    def describe(self) -> dict[str, str]:
        """Each library, with what the probe has found so far: for the doctor."""
        found = dict(self.absent)
        for library in self.libraries:
            tried = self.verdicts(library).read()
            outcomes = without_repeats([outcome for outcomes in tried for outcome in outcomes])
            wrong = [outcome for outcome in outcomes if outcome.problem]
            verdict = f"{len(outcomes) - len(wrong)} of {len(outcomes)} cases right" if outcomes else "not tried yet"
            said = "; ".join(dict.fromkeys(f"{outcome.case}: {outcome.problem}" for outcome in wrong))
            found[library.contract.library] = ": ".join(filter(None, [f"{library.version}, {verdict}", said]))
        return found

    def verdicts(self, library: Library) -> Verdicts:
        contract = library.contract
        return Verdicts(self.folder, Subject.here(contract.library, library.version, contract.device, CODE))

    def library_for(
        self,
        op: str,
        knob: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: Sequences,
        *,
        backward: bool,
    ) -> Library:
        # Within a class of shapes lengths are left to the check of the call itself.
        packed, cached = sequences.cu_seqlens is not None, sequences.q_start is not None
        shape = (q.shape[0] > 1, (q.shape[1] - 1).bit_length(), (k.shape[1] - 1).bit_length())
        # The device with its index: another GPU has a verdict of its own.
        sizes = (q.dtype, q.device, q.shape[2:], k.shape[2], v.shape[3])
        kind = (op, knob, *shape, *sizes, backward, packed, cached)
        if kind in self.serving:
            return self.serving[kind]
        problem = Posed(
            op=op,
            knob=knob,
            batch=q.shape[0],
            n_queries=q.shape[1],
            n_keys=k.shape[1],
            n_heads=q.shape[2],
            n_groups=k.shape[2],
            d_k=q.shape[3],
            d_v=v.shape[3],
            dtype=q.dtype,
            device=q.device.type,
            backward=backward,
            packed=packed,
            cached=cached,
        )
        with torch.cuda.device_of(q):
            found = self.choose(problem)
        if isinstance(found, str):
            raise CallRefused(found)
        self.serving[kind] = found
        return found

    def cast(self, q: Tensor) -> torch.dtype:
        """The dtype to call in; a change of it is said, once."""
        dtype = self.dtype_of(q.dtype)
        if dtype != q.dtype and not self.said_cast:
            self.said_cast = True
            why = self.config.describe("fa2_prefer_fp16")
            log.warning("nsa: %s: %s inputs are cast to %s for FlashAttention", why, q.dtype, dtype)
        return dtype

    def forward(
        self, op: str, hyperparameter: int, make_plan: Callable[..., Plan], tensors: tuple[Tensor, ...], branch: Any
    ) -> tuple[Tensor, Tensor]:
        q, k, v = tensors
        if k.shape[1] == 0:
            lse = torch.full(q.shape[:3], NEGATIVE_INFINITY, dtype=torch.float32, device=q.device)
            return q.new_zeros(*q.shape[:3], v.shape[3]), lse
        library = self.library_for(op, hyperparameter, q, k, v, branch.sequences, backward=False)
        return attend(library, q, k, v, make_plan(q, k, branch), branch.scale, self.cast(q))

    def backward(
        self,
        op: str,
        hyperparameter: int,
        make_plan: Callable[..., Plan],
        upstream: Upstream,
        saved: Saved,
        branch: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = saved[:3]
        if k.shape[1] == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        library = self.library_for(op, hyperparameter, q, k, v, branch.sequences, backward=True)
        return gradients(library, upstream, saved, make_plan(q, k, branch), branch.scale, self.cast(q))

    def compressed_forward(self, q: Tensor, k: Tensor, v: Tensor, branch: Compressed) -> tuple[Tensor, Tensor]:
        return self.forward("compressed", branch.stride, compressed_plan, (q, k, v), branch)

    @without_gate
    def compressed_backward(
        self, upstream: Upstream, saved: Saved, branch: Compressed
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.backward("compressed", branch.stride, compressed_plan, upstream, saved, branch)

    def sliding_forward(self, q: Tensor, k: Tensor, v: Tensor, branch: Sliding) -> tuple[Tensor, Tensor]:
        return self.forward("sliding", branch.window, sliding_plan, (q, k, v), branch)

    @without_gate
    def sliding_backward(self, upstream: Upstream, saved: Saved, branch: Sliding) -> tuple[Tensor, Tensor, Tensor]:
        return self.backward("sliding", branch.window, sliding_plan, upstream, saved, branch)


def likely_stride(problem: Problem) -> int:
    """The stride of a compressed problem: its keys are one for every stride, but for a few at the start."""
    return max(1, round(problem.n_queries / (problem.n_keys + 1))) if problem.n_keys else 1


def branches_of(problem: Problem, block: int, stride: int, window: int) -> list[Posed]:
    """The problems that this backend serves of the whole attention; or the problem itself."""
    knobs = {"sliding": window, "compressed": stride}
    if problem.op != "attention":
        return [posed(problem, knobs[problem.op])] if problem.op in knobs else []
    n_blocks = n_compressed(problem.n_keys, block, stride)
    parts = [problem.for_op("sliding"), replace(problem, op="compressed", n_keys=n_blocks)]
    return [posed(part, knobs[part.op]) for part in parts]


def without_repeats(outcomes: list[Outcome]) -> list[Outcome]:
    """Every kind of problem has the fixed cases: a call and its end count once."""
    return list({(outcome.case, outcome.call, outcome.problem): outcome for outcome in outcomes}.values())


def configure(config: Settings) -> FlashBackend:
    """The backend for these settings. Looks for libraries by name; imports none of them."""
    libraries, absent = find_libraries()
    return FlashBackend(config, libraries, absent)
