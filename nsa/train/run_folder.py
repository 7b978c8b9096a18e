"""Names in a run's folder, for whoever looks for a checkpoint before torch is imported."""

from __future__ import annotations

import re
from pathlib import Path

from nsa.config import require
from nsa.files import TEMPORARY

CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"

# A folder whose name ends so is no checkpoint: it is being written, being replaced, or being removed.
REPLACED = ".replaced" + TEMPORARY
REMOVED = ".removed" + TEMPORARY

STEP = re.compile(r"step_(0|[1-9][0-9]*)")
LEFTOVER = re.compile(rf"{STEP.pattern}(\.replaced|\.removed)?{re.escape(TEMPORARY)}")


def saved_steps(folder: Path) -> list[int]:
    """The steps that `folder` has a checkpoint of, in order; none where it does not exist."""
    if not folder.is_dir():
        return []
    names = (STEP.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in names if match)


def require_checkpoint(run: Path, argument: str) -> None:
    """`ValueError`, naming `argument`, unless `run` has a checkpoint: without one, a start would empty its metrics."""
    folder = run / CHECKPOINTS
    found = bool(saved_steps(folder)) or any(folder.glob(f"step_*{REPLACED}"))
    require(
        found,
        argument,
        str(run),
        f"a run with a checkpoint, and {folder} has none: restore it from a copy, or start again from step 0 with "
        f"--config and another --out (or --out {run}, once its {METRICS} is moved away)",
    )
