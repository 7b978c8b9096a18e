"""These tests run on a CUDA GPU (`pytest tests/gpu`) and are skipped elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

# The helpers of the CPU tests serve here too, whichever folder pytest was started on.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if HERE in Path(item.fspath).resolve().parents:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def selected_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], list[str]]]:
    """`selected_by("block")`: from here on the Triton selected forward goes by that method, whatever the length.

    The list that it returns grows by the method that each forward really went by.
    """
    from nsa.backends import routing
    from nsa.backends.triton import selected

    intact, plan, taken = selected.selected_forward, selected.plan_forward, []

    def recorded(*key: Any) -> selected.SelectedForwardPlan:
        found = plan(*key)
        taken.append(found.run.method)
        return found

    monkeypatch.setattr(selected, "plan_forward", recorded)

    def choose(method: str | None) -> list[str]:
        monkeypatch.setattr(selected, "selected_forward", partial(intact, method=method))
        forget_resolved()
        return taken

    def forget_resolved() -> None:
        routing.router().stages.clear()
        routing.router().plans.clear()

    yield choose
    forget_resolved()
