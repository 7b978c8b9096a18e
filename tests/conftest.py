"""One thread, one seed, one hypothesis profile; and a way to set NSA_* variables that the library then really reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from browsing import Browser, start_browser

from nsa import settings
from nsa.backends import routing
from nsa.backends.triton import tuning

# On CI the same examples every time; at a desk new ones, and failures are remembered in .hypothesis.
for profile, max_examples in {"nsa": 30, "quick": 8}.items():
    hypothesis.settings.register_profile(
        profile, deadline=None, max_examples=max_examples, derandomize="CI" in os.environ
    )


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("quick" if config.option.markexpr == "not slow" else "nsa")


# Workers of pytest-xdist share the cores; small tensors gain nothing from threads.
torch.set_num_threads(1)
# The first backward pass starts autograd's threads for the devices there are, after which no fork can train. Were it
# one of opcheck's, which fakes a GPU, tests that fork could not run in this process.
torch.ones((), requires_grad=True).backward()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=3, help="how often tests/train/test_train_resume.py kills its run")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from start_browser()


@pytest.fixture(autouse=True)
def seed() -> int:
    """Every test starts from the same random state."""
    torch.manual_seed(0)
    return 0


def forget_settings() -> None:
    settings.current.cache_clear()
    routing.router.cache_clear()
    tuning.tuned.cache_clear()
    tuning.pick_tile.cache_clear()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`environment(NSA_FORCE_PARITY="1")` sets variables and makes the library read its settings anew."""
    for name in [name for name in os.environ if name.startswith("NSA_")]:
        monkeypatch.delenv(name)
    forget_settings()

    def set_variables(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        forget_settings()

    yield set_variables
    monkeypatch.undo()
    forget_settings()


@pytest.fixture
def children_find_the_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a test starts import this checkout, and tests/flash_standin.py."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here.parent}{os.pathsep}{here}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
