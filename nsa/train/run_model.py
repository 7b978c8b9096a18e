"""Loads the model of a run, finished or not: from the export at its end, or else from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from nsa.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from nsa.model import LM, load_model
from nsa.model.checkpoint import MODEL_CONFIG, saved_step
from nsa.progress import say
from nsa.train.checkpoint import read_state
from nsa.train.run_folder import CHECKPOINTS, CONFIG, STEP, saved_steps
from nsa.train.run_info import config_of
from nsa.train.storage import Damaged, Index


def load_run(folder: Path, device: torch.device | str = "cpu") -> tuple[LM, Tokenizer]:
    """Load the model of a run, and its tokenizer.

    Args:
        folder: A run, whose exported model is loaded, or, where a checkpoint is of a later step, the newest good
            checkpoint, which is named on stderr; or a checkpoint, `checkpoints/step_N`.
        device: The device of the parameters.

    Returns:
        The model in eval mode, and its tokenizer: bytes for a model outside a run that was saved without one.

    Raises:
        ValueError: The folder has no model, or a file is damaged; the message names it.
    """
    run = run_of(folder)
    named = [int(folder.resolve().name.removeprefix("step_"))] if run != folder else []
    steps = named or saved_steps(run / CHECKPOINTS)
    if named or (steps and not is_exported(run, steps[-1])):
        model = load_newest(run, steps).to(device).eval()
    else:
        model = load_model(run, device)
    # A run always saves its tokenizer: in its place, bytes would give wrong text.
    needed = (run / TOKENIZER_FILE).is_file() or (run / CONFIG).is_file()
    return model, load_tokenizer(run if needed else "bytes")


def is_exported(run: Path, last: int) -> bool:
    """Whether a run has an exported model, and not one of before step `last`, from which it was resumed."""
    if not (run / MODEL_CONFIG).is_file():
        return False
    step = saved_step(run)
    return step is None or step >= last


def run_of(folder: Path) -> Path:
    """The run of a checkpoint's folder; any other folder itself."""
    path = folder.resolve()
    return path.parents[1] if STEP.fullmatch(path.name) and path.parent.name == CHECKPOINTS else folder


def load_newest(run: Path, steps: list[int]) -> LM:
    """The model of the last of the steps whose checkpoint is intact and good, or is the only one requested."""
    problems = []
    for step in reversed(steps):
        folder = run / CHECKPOINTS / f"step_{step}"
        try:
            index = Index.read(folder)
            index.check(folder, index.files)
        except Damaged as error:
            problems.append(f"{folder.name}: {error}")
            continue
        if index.good or len(steps) == 1:
            say(f"the model is that of step {step}, in {folder}", error=True)
            return read_model(run, folder, index)
        problems.append(f"{folder.name}: its loss or gradients were not finite")
    raise ValueError(f"folder is {str(run)!r}; accepted: one with a good checkpoint ({'; '.join(problems)})")


def read_model(run: Path, folder: Path, index: Index) -> LM:
    with torch.device("meta"):
        model = LM(config_of(run).model.with_backend("auto")).to_empty(device="cpu")
    tensors = {name: x for name, x in index.tensors.items() if name.startswith("model.")}
    state = {f"model.{name}": x for name, x in model.state_dict().items()}
    read_state(folder, index._replace(tensors=tensors), state)
    return model
