"""The backend as the router sees it: which library runs a problem, or why none does."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa import settings
from nsa.backends.flash import policy
from nsa.backends.flash.branches import CallPlan, attend_branch, compressed_plan, gradients, padded, sliding_plan
from nsa.backends.flash.cases import CODE, USUAL, FlashProblem, cases_of, flash_problem, kind_of
from nsa.backends.flash.contracts import limits, rows_in_tiles
from nsa.backends.flash.libraries import Library, find_libraries
from nsa.backends.flash.probe import CACHE_FOLDER, Outcome, Subject, Verdicts, report, run_cases
from nsa.backends.gated import without_gate
from nsa.backends.problem import SIZES, Problem
from nsa.backends.routing import CallUnsupported, FailureReason
from nsa.backends.stages import attention_shape
from nsa.geometry import n_compressed
from nsa.sequences import Saved, Upstream
from nsa.settings import Settings

log = logging.getLogger("nsa")

PLANS: dict[str, Callable[..., CallPlan]] = {"compressed": compressed_plan, "sliding": sliding_plan}
# Tries a kind of problem that has no verdict yet.
Prober = Callable[[Library, FlashProblem, int, torch.dtype], list[Outcome]]


def probe_in_child(library: Library, problem: FlashProblem, head_dim: int, dtype: torch.dtype) -> list[Outcome]:
    device = f"cuda:{torch.cuda.current_device()}" if problem.device == "cuda" else problem.device
    # An embedded Python may not know its own path; no child starts then. `-P`: the working directory may hold modules
    # with the names of those that the child needs.
    command = [sys.executable or "", "-P", "-m", "nsa.backends.flash.probe_child", library.address, device]
    return run_cases(command, cases_of(problem, head_dim, dtype))


@dataclass
class FlashBackend:
    """`libraries` in the order to try them; `absent`: why not the others. Verdicts are kept in `folder`."""

    config: Settings
    libraries: tuple[Library, ...]
    absent: dict[str, str] = field(default_factory=dict)
    folder: Path | None = field(default_factory=lambda: settings.expand_home(CACHE_FOLDER))
    prober: Prober = probe_in_child
    name: str = "flash"
    # Of this process: verdicts, the library of each kind of call, whether the cast was logged.
    tried: dict[tuple[Subject, str], list[Outcome]] = field(default_factory=dict, repr=False)
    in_use: dict[tuple[object, ...], Library] = field(default_factory=dict, repr=False)
    logged_cast: bool = False

    def available(self) -> str | None:
        """Why nothing can run on this machine; None if something can."""
        flags = policy.flags(self.config)
        if all(flag.state == "off" for flag in flags.values()):
            return next(iter(flags.values())).why
        if {library.contract.device for library in self.libraries} <= {"cuda"} and not torch.cuda.is_available():
            return "no CUDA GPU"
        return None if self.libraries else "; ".join(self.absent.values())

    def declined(self, problem: Problem, *, named: bool) -> str | None:
        """Why the settings keep FlashAttention from the problem."""
        return policy.reason_against(self.config, problem, named=named)

    def forced_on(self, problem: Problem) -> str | None:
        """The setting that puts FlashAttention first."""
        flag = policy.flag(self.config, problem.op) if problem.op in policy.BRANCH_SETTINGS else None
        return flag.why if flag is not None and flag.state == "on" else None

    def supports(self, problem: Problem) -> str | None:
        """Return None if a library runs the problem, else why not. The first question of its kind starts a probe."""
        found = self.choose(problem)
        return found if isinstance(found, str) else None

    def choose(self, problem: Problem) -> Library | str:
        """The library that runs the problem, or every reason why none does."""
        if problem.op not in policy.BRANCH_SETTINGS:
            return f"FlashAttention runs the compressed and the sliding branch, not {problem.op}"
        if problem.n_queries < 1:
            return "there are no queries"
        if problem.cached and problem.varlen:
            return "queries start in the middle of documents"
        if problem.cached and problem.backward:
            return "a cache has no gradient"
        if problem.cached and problem.op == "compressed" and problem.n_queries > 1:
            return "several queries on the compressed keys of a cache start in the middle of a block"
        reasons, failed = [], False
        for library in self.libraries:
            reason = self.outside_contract(library, problem) or self.verdict(library, flash_problem(problem))
            if reason is None:
                return library
            reasons.append(f"{library.contract.library}: {reason}")
            failed = failed or isinstance(reason, FailureReason)
        text = "; ".join([*reasons, *self.absent.values()])
        return FailureReason(text) if failed else text

    def outside_contract(self, library: Library, problem: Problem) -> str | None:
        """Return the limits of the library that forbid the problem; None if none do."""
        if problem.device != library.contract.device:
            return f"it runs on {library.contract.device}, the tensors are on {problem.device}"
        if (obstacle := library.obstacle()) is not None:
            return obstacle
        # Folding multiplies heads by the stride. Before a call gives it, the number of keys does; the call itself is
        # checked again.
        # It has one key per stride, but for a few at the start.
        stride = max(1, round(problem.n_queries / (problem.n_keys + 1))) if problem.n_keys else 1
        called = flash_problem(problem, stride)
        batch = 1 if problem.varlen else problem.batch
        rows = rows_in_tiles(batch, called.length_called, varlen=problem.varlen) if problem.backward else None
        capability = torch.cuda.get_device_capability() if problem.device == "cuda" else None
        sizes = {"head_dim": padded(problem.d_k, problem.d_v), "n_heads": called.heads_called, "n_sequences": batch}
        dtype = self.dtype_of(problem.dtype)
        return "; ".join(limits(library.contract, capability, dtype=dtype, **sizes, gradient_rows=rows)) or None

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """fp32 is cast only if the user requested it."""
        return torch.float16 if dtype == torch.float32 and self.config.fa2_prefer_fp16 else dtype

    def verdict(self, library: Library, problem: FlashProblem) -> str | None:
        """Return None if every case of the probe was right, else what was wrong."""
        found = [outcome for outcome in self.outcomes(library, problem) if outcome.problem]
        # A full GPU is no failure of the library: reported only if there is none.
        worst = min(found, key=lambda outcome: outcome.transient, default=None)
        if worst is None:
            return None
        reason = f"the probe's case {worst.case!r} {worst.problem} (nsa doctor --probe tries again)"
        return reason if worst.transient else FailureReason(reason)

    def verdicts(self, library: Library) -> Verdicts:
        contract = library.contract
        return Verdicts(self.folder, Subject.here(contract.library, library.version, contract.device, CODE))

    def outcomes(self, library: Library, problem: FlashProblem) -> list[Outcome]:
        """The probe's outcomes, from memory, from the user's cache folder or from a child process, in this order."""
        verdicts, kind = self.verdicts(library), self.kind_of(problem)
        key = (verdicts.subject, kind)
        if key not in self.tried:
            found = verdicts.get(kind)
            self.tried[key] = self.probe(library, problem) if found is None else found
        return self.tried[key]

    def kind_of(self, problem: FlashProblem) -> str:
        return kind_of(problem, padded(problem.d_k, problem.d_v), self.dtype_of(problem.dtype))

    def probe(self, library: Library, problem: FlashProblem) -> list[Outcome]:
        verdicts, kind = self.verdicts(library), self.kind_of(problem)
        subject = verdicts.subject
        # A run stands still meanwhile: say why.
        log.warning("nsa: probing %s %s on %s for %s, once", subject.library, subject.version, subject.gpu, kind)
        found = self.prober(library, problem, padded(problem.d_k, problem.d_v), self.dtype_of(problem.dtype))
        if any(outcome.problem for outcome in found):
            log.warning("nsa: %s", report(subject, found))
        if found and not any(outcome.transient for outcome in found):
            verdicts.put(kind, found)
        self.tried[subject, kind] = found
        self.in_use.clear()
        return found

    def probe_all(self, problem: Problem, **hyperparameters: int) -> list[tuple[Library, Subject, list[Outcome]]]:
        """Discard the verdicts and try every library on the `variants` of `problem` that its limits allow."""
        found = []
        for library in self.libraries:
            tried = variants(problem, **hyperparameters)
            problems = [one for one in tried if self.outside_contract(library, one) is None]
            if problems:
                verdicts = self.verdicts(library)
                verdicts.forget()
                self.tried = {key: kept for key, kept in self.tried.items() if key[0] != verdicts.subject}
                outcomes = [outcome for one in problems for outcome in self.probe(library, one)]
                found.append((library, verdicts.subject, without_repeats(outcomes)))
        return found

    def describe(self) -> dict[str, str]:
        """Each library with the state of its verdicts, for the doctor."""
        found = dict(self.absent)
        for library in self.libraries:
            outcomes = without_repeats([one for outcomes in self.verdicts(library).read() for one in outcomes])
            wrong = [f"{outcome.case}: {outcome.problem}" for outcome in outcomes if outcome.problem]
            verdict = f"{len(outcomes) - len(wrong)} of {len(outcomes)} cases right" if outcomes else "not tried yet"
            wrong_text = f": {'; '.join(dict.fromkeys(wrong))}" if wrong else ""
            found[library.contract.library] = f"{library.version}, {verdict}{wrong_text}"
        return found

    def library_for(self, op: str, branch: Any, q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> Library:
        """The library that runs a call; decided once per class of shapes. Exact sizes are checked with the call."""
        sequences = branch.sequences
        layout = {"varlen": sequences.cu_seqlens is not None, "cached": sequences.q_start is not None}
        call = {"op": op, "window_or_stride": branch.window if op == "sliding" else branch.stride}
        call |= {"dtype": q.dtype, "backward": backward, **layout}
        lengths = (q.shape[0] > 1, (q.shape[1] - 1).bit_length(), (k.shape[1] - 1).bit_length())
        # The device with its index: each GPU has its own verdict.
        kind = (*call.values(), *lengths, q.shape[2:], k.shape[2], v.shape[3], q.device)
        if kind not in self.in_use:
            sizes: dict[str, Any] = dict(zip(SIZES, attention_shape(q, k, v), strict=True))
            with torch.cuda.device_of(q):
                found = self.choose(FlashProblem(**call, **sizes, device=q.device.type))
            if isinstance(found, str):
                raise CallUnsupported(found)
            self.in_use[kind] = found
        return self.in_use[kind]

    def cast(self, q: Tensor) -> torch.dtype:
        """The dtype to call in; logs a cast once."""
        dtype = self.dtype_of(q.dtype)
        if dtype != q.dtype and not self.logged_cast:
            self.logged_cast = True
            why = self.config.describe("fa2_prefer_fp16")
            log.warning("nsa: %s: %s inputs are cast to %s for FlashAttention", why, q.dtype, dtype)
        return dtype

    def forward(self, op: str, q: Tensor, k: Tensor, v: Tensor, branch: Any) -> tuple[Tensor, Tensor]:
        if k.shape[1] == 0:
            lse = torch.full(q.shape[:3], float("-inf"), dtype=torch.float32, device=q.device)
            return q.new_zeros(*q.shape[:3], v.shape[3]), lse
        library = self.library_for(op, branch, q, k, v, backward=False)
        return attend_branch(library, q, k, v, PLANS[op](q, k, branch), branch.scale, self.cast(q))

    @without_gate
    def backward(self, op: str, upstream: Upstream, saved: Saved, branch: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = saved[:3]
        if k.shape[1] == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        library = self.library_for(op, branch, q, k, v, backward=True)
        return gradients(library, upstream, saved, PLANS[op](q, k, branch), branch.scale, self.cast(q))

    compressed_forward, sliding_forward = partialmethod(forward, "compressed"), partialmethod(forward, "sliding")
    compressed_backward, sliding_backward = partialmethod(backward, "compressed"), partialmethod(backward, "sliding")


def variants(
    problem: Problem,
    *,
    block: int = 2 * USUAL["compressed"],
    stride: int = USUAL["compressed"],
    window: int = USUAL["sliding"],
) -> Iterator[FlashProblem]:
    """Each branch and layout of the whole attention `problem`; a step of one query for the cached layout."""
    n_blocks = n_compressed(problem.n_keys, block, stride)
    sliding = flash_problem(problem.for_op("sliding"), window)
    compressed = flash_problem(replace(problem, op="compressed", n_keys=n_blocks), stride)
    for one in (sliding, compressed):
        yield one
        yield replace(one, batch=1, varlen=True)
    yield replace(sliding, n_queries=1, cached=True, backward=False)


def without_repeats(outcomes: list[Outcome]) -> list[Outcome]:
    """Kinds of problems share cases: a call and its end count once."""
    return list({(outcome.case, outcome.call, outcome.problem): outcome for outcome in outcomes}.values())


def configure(config: Settings) -> FlashBackend:
    """The backend for these settings. Looks for libraries by name; imports none of them."""
    libraries, absent = find_libraries()
    return FlashBackend(config, libraries, absent)
