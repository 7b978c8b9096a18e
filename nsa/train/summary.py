"""What a run comes to: its last metrics line, and the last lines that it prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass
class Summary:
    """What a run comes to."""

    loss_start: float
    loss_end: float
    # None for a run of one step, which is not timed.
    tokens_per_s: float | None
    skipped: int
    # Batches of noise that stood in for data that did not come.
    stand_ins: int
    # How often each backend was called for each op, by "op/backend"; a graph's replays are not calls.
    served: dict[str, int]
    fallbacks: dict[str, int]
    sample: str
    checkpoint: Path
    report: Path | None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "checkpoint": str(self.checkpoint), "report": str(self.report)}

    def __str__(self) -> str:
        failures = ", ".join(f"{reason} ({times} times)" for reason, times in self.fallbacks.items())
        served = ", ".join(f"{who} {times:,}" for who, times in self.served.items())
        rate = self.tokens_per_s
        return "\n".join(
            [
                f"validation loss {self.loss_start:.3f} -> {self.loss_end:.3f}",
                "speed not measured: the first step is not timed" if rate is None else f"{rate:,.0f} tokens/s",
                f"served by: {served or 'torch alone'}",
                f"fallbacks: {failures or 'none'}   skipped steps: {self.skipped}   stand-in batches: {self.stand_ins}",
                f"sample:\n{self.sample}",
                f"saved {self.checkpoint}",
                f"report {self.report}",
            ]
        )
