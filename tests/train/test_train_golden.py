"""The losses of the tiny config's first steps, in git: they change on purpose or not at all.

python tests/train/test_train_golden.py    # writes them anew
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch

from nsa.settings import Settings
from nsa.train import Trainer, load_config

FILE = Path(__file__).parent / "goldens" / "tiny.json"
STEPS = 20

# Another CPU or library adds up in another order. Parameters that are off by a millionth from the first step on move
# these losses by 1.4e-5 at most.
TOLERANCE = 5e-4


def text() -> str:
    """The same on every machine, which the standard library is not."""
    return "\n".join(f"def f{i}(x):\n    return x * {i * i % 97} + {i % 13}  # {i:>6} of 4000\n" for i in range(4000))


def first_losses(folder: Path, attention: str) -> list[float]:
    (folder / "text.txt").write_text(text())
    changes = {
        "model.attention": attention,
        "data": {"source": "text", "path": str(folder / "text.txt")},
        "device": "cpu",
        "dtype": "float32",
        "out": str(folder / attention),
    }
    trainer = Trainer(load_config("tiny", changes, env=Settings()))
    results = [trainer.step(step, trainer.fetch()).loss for step in range(STEPS)]
    trainer.loader.close()
    return torch.stack(results).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_the_first_losses_are_those_in_git(attention: str, tmp_path: Path) -> None:
    expected = json.loads(FILE.read_text())[attention]
    assert first_losses(tmp_path, attention) == pytest.approx(expected, rel=TOLERANCE)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        goldens = {kind: first_losses(Path(folder), kind) for kind in ("nsa", "dense")}
    FILE.write_text(json.dumps(goldens, indent=1) + "\n")
