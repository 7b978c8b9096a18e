"""The policy for FlashAttention: what the `NSA_*FA2*` settings mean for each branch.

A branch is `off` where a setting disables it, also for `backend="flash"`; `explicit_only` where `auto` must never pick
it; `on` where the user enabled it or gave a minimum length: it then goes first; and otherwise `default`: it has its
place in the router's order, after our kernels unless a measured route moves it, for whole sequences only. Decode with a
cache was never measured, so `auto` leaves it to other backends unless the branch is `on`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from nsa.backends.flash.contracts import HEAD_DIM_STEP
from nsa.backends.problem import Problem
from nsa.settings import Settings

# Per branch: the settings that enable it, and the one with its minimum number of keys.
BRANCH_SETTINGS = {
    "compressed": (("use_fa2", "use_fa2_cmp"), "fa2_min_len_cmp"),
    "sliding": (("use_fa2", "use_fa2_win"), "fa2_min_len_win"),
}


@dataclass(frozen=True)
class Flag:
    """The effective state of one branch, and the setting that decided it."""

    state: Literal["off", "explicit_only", "on", "default"]
    why: str
    min_keys: int = 0

    def __str__(self) -> str:
        return f"{self.state}: {self.why}"


def flag(config: Settings, op: str) -> Flag:
    switches, min_keys_setting = BRANCH_SETTINGS[op]
    for switch in switches:
        if not getattr(config, switch):
            return Flag("off", config.describe(switch))
    min_keys = getattr(config, min_keys_setting)
    if min_keys is not None:
        state: Literal["explicit_only", "on"] = "explicit_only" if min_keys < 0 else "on"
        return Flag(state, config.describe(min_keys_setting), max(min_keys, 0))
    enabled = [switch for switch in switches if config.source(switch) != "default"]
    if enabled:
        return Flag("on", config.describe(enabled[-1]))
    return Flag("default", "after the Triton kernels and before SDPA, unless a measured route says otherwise")


def flags(config: Settings) -> dict[str, Flag]:
    return {op: flag(config, op) for op in BRANCH_SETTINGS}


def reason_against(config: Settings, problem: Problem, *, named: bool) -> str | None:
    """Why the settings keep FlashAttention from the problem; None if they do not. `named`: `backend="flash"`."""
    if problem.op not in BRANCH_SETTINGS:
        return None
    found = flag(config, problem.op)
    if found.state == "off" or (found.state == "explicit_only" and not named):
        return found.why
    if not named and problem.n_keys < found.min_keys:
        return f"{found.why}, the problem has {problem.n_keys} keys"
    if not named and problem.cached and found.state == "default":
        return "decode with FlashAttention was never measured (NSA_USE_FA2=1 uses it)"
    if problem.cached and problem.dtype == torch.float32 and config.fa2_prefer_fp16:
        return f"{config.describe('fa2_prefer_fp16')}, and a cast would copy the cache at every step"
    if problem.cached and (problem.d_k != problem.d_v or problem.d_k % HEAD_DIM_STEP):
        return f"d_k is {problem.d_k} and d_v {problem.d_v}: padding them would copy the cache at every step"
    return None
