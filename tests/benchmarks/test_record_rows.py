"""benchmarks/record.py: its commands are ones that `nsa` takes, and what has no time left is left out."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nsa.cli import parser_of

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "record.py"
RECORD: dict[str, Any] = runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize("step", RECORD["STEPS"])
def test_commands_are_valid(step: str, tmp_path: Path) -> None:
    for tree, _, words in RECORD["commands"](step, tmp_path, "abc", tmp_path / "before"):
        if words[:3] == ["-m", "nsa", "bench"]:
            parser_of("bench").parse_args(words[3:])
        elif words[0].endswith(".py"):
            assert (tree / words[0]).is_file()
        else:
            assert words[:2] == ["-m", "pytest"]


def test_the_two_trees_alternate(tmp_path: Path) -> None:
    runs = RECORD["commands"]("compare", tmp_path, "abc", tmp_path / "before")
    trees = [tree == tmp_path / "before" for tree, _, _ in runs]
    assert trees == [True, False, True, False, False]
    assert [words[words.index("--commit") + 1] for _, _, words in runs[:2]] == ["baseline", "abc"]


def test_without_time_nothing_runs(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), "--steps", "host", "--minutes", "0.1", "--out", str(tmp_path / "rows")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1
    assert "left out" in done.stdout
    assert not (tmp_path / "rows").exists()


def test_a_comparison_needs_a_baseline() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--steps", "bits"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--baseline" in done.stderr
