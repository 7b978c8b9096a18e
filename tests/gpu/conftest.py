"""These tests run on a CUDA GPU (`pytest tests/gpu`) and are skipped elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

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
