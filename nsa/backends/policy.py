"""When FlashAttention may be used: the effective flags of the `NSA_*FA2*` settings, worked out here and nowhere else.

A branch is `off` where a setting says so, also for a backend asked for by name; `by name` where `auto` must never pick
it; `on` where the user switched it on or named a length: it then goes first; and otherwise `measured`: `auto` takes it
only where the thresholds file says that it wins on this GPU.

Whatever the settings say, a cache that would have to be copied at every step is left to the other backends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from nsa.backends.contracts import TORCH
from nsa.backends.problem import Problem
from nsa.settings import Settings

# The settings that speak for a branch: those that switch it, and the fewest keys for `auto` to pick it.
BRANCHES = {
    "compressed": (("use_fa2", "use_fa2_cmp"), "fa2_min_len_cmp"),
    "sliding": (("use_fa2", "use_fa2_win"), "fa2_min_len_win"),
}
NOT_MEASURED = "no measurement says that FlashAttention wins here (nsa bench flash measures, NSA_USE_FA2=1 insists)"


@dataclass(frozen=True)
class Flag:
    """What holds for one branch, and whose word that is."""

    state: Literal["off", "by name", "on", "measured"]
    why: str
    fewest_keys: int = 0

    def __str__(self) -> str:
        return f"{self.state}: {self.why}"

    def reason_against(self, n_keys: int, *, measured: bool) -> str | None:
        """None when `auto` may ask FlashAttention. `measured`: the thresholds file lists it for the problem."""
        if self.state == "measured":
            return None if measured else NOT_MEASURED
        if self.state == "on":
            return None if n_keys >= self.fewest_keys else f"{self.why}, the problem has {n_keys} keys"
        return self.why


def flag(config: Settings, op: str) -> Flag:
    switches, threshold = BRANCHES[op]
    for switch in switches:
        if not getattr(config, switch):
            return Flag("off", config.describe(switch))
    fewest = getattr(config, threshold)
    if fewest is not None:
        return Flag("by name" if fewest < 0 else "on", config.describe(threshold), max(fewest, 0))
    asked_for = [switch for switch in switches if config.source(switch) != "default"]
    if asked_for:
        return Flag("on", config.describe(asked_for[-1]))
    return Flag("measured", "the thresholds file decides")


def flags(config: Settings) -> dict[str, Flag]:
    return {op: flag(config, op) for op in BRANCHES}


def insists(config: Settings, op: str) -> bool:
    """Whether the user switched FlashAttention on for the branch: then it goes before what was measured."""
    return op in BRANCHES and flag(config, op).state == "on"


def reason_against(config: Settings, problem: Problem, *, named: bool, measured: bool) -> str | None:
    """None when FlashAttention may be asked about the problem. `named`: somebody asked for it."""
    if problem.op not in BRANCHES:
        return None
    found = flag(config, problem.op)
    if named:
        reason = found.why if found.state == "off" else None
    else:
        reason = found.reason_against(problem.n_keys, measured=measured)
    return reason or copied_cache(config, problem)


def copied_cache(config: Settings, problem: Problem) -> str | None:
    """Why a step could not view its cache: one query must not cost a copy of all keys."""
    if not problem.cached:
        return None
    if problem.dtype == torch.float32 and config.fa2_prefer_fp16:
        return f"{config.describe('fa2_prefer_fp16')}, and a cast would copy the cache at every step"
    if problem.d_k != problem.d_v or problem.d_k % TORCH.width_step:
        widths = f"keys are {problem.d_k} and values {problem.d_v} wide"
        return f"{widths}: filling them up with zeros would copy the cache at every step"
    return None
