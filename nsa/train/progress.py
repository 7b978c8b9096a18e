"""How a run shows where it is: lines of text, or a bar where rich is installed and someone is watching."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol


class Progress(Protocol):
    def show(self, step: int, text: str) -> None: ...

    def close(self) -> None: ...


class Lines:
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def show(self, step: int, text: str) -> None:
        print(f"step {step:>{len(str(self.steps))}}/{self.steps}  {text}", flush=True)

    def close(self) -> None:
        """Nothing to put away."""


class Bar:
    def __init__(self, steps: int) -> None:
        rich = import_module("rich.progress")
        self.bar = rich.Progress(
            rich.MofNCompleteColumn(),
            rich.BarColumn(),
            rich.TimeRemainingColumn(),
            rich.TextColumn("{task.description}"),
        )
        self.task = self.bar.add_task("", total=steps)
        self.bar.start()

    def show(self, step: int, text: str) -> None:
        self.bar.update(self.task, completed=step, description=text)

    def close(self) -> None:
        self.bar.stop()


def progress(steps: int) -> Progress:
    return Bar(steps) if find_spec("rich") is not None and sys.stdout.isatty() else Lines(steps)
