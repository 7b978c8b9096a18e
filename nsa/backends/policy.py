"""When FlashAttention may be used: the effective flags of the `NSA_*FA2*` settings, worked out here and nowhere else.

A branch is `off` where a setting says so, also for a backend asked for by name; `by name` where `auto` must never pick
it; `on` where the user switched it on or named a length: it then goes first; and otherwise `measured`: `auto` takes it
only where the thresholds file says that it wins on this GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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


def reason_against(config: Settings, op: str, n_keys: int, *, named: bool, measured: bool) -> str | None:
    """None when FlashAttention may be asked about the branch `op`. `named`: somebody asked for it."""
    if op not in BRANCHES:
        return None
    found = flag(config, op)
    if named:
        return found.why if found.state == "off" else None
    return found.reason_against(n_keys, measured=measured)
