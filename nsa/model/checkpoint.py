"""A model in a folder: `model.json` says what it is, `model.safetensors` (or `model.pt`) holds its parameters.

safetensors where it is installed, else torch's own format, read with `weights_only=True`: neither can run code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from textwrap import shorten

import torch
from torch import Tensor

from nsa.config import require
from nsa.model.config import LMConfig
from nsa.model.transformer import LM

CONFIG, SAFE, PLAIN = "model.json", "model.safetensors", "model.pt"


def save_model(model: LM, folder: Path) -> Path:
    """Write the model into `folder` and return the file with its parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(model.config.to_dict(), indent=2) + "\n")
    state = {name: x.detach().cpu().contiguous() for name, x in model.state_dict().items()}
    if find_spec("safetensors") is None:
        path, stale = folder / PLAIN, folder / SAFE
        torch.save(state, path)
    else:
        path, stale = folder / SAFE, folder / PLAIN
        import_module("safetensors.torch").save_file(state, path)
    # One folder, one model: the other format of an earlier save would be read in its place.
    stale.unlink(missing_ok=True)
    return path


def load_model(folder: Path, device: torch.device | str = "cpu", *, backend: str = "auto") -> LM:
    """The model of `folder`, ready to generate. Who computes it is decided here: it was trained on another machine."""
    require((folder / CONFIG).is_file(), "folder", str(folder), f"a folder with {CONFIG}, as `nsa train` writes it")
    with naming(folder / CONFIG):
        config = LMConfig.from_dict(json.loads((folder / CONFIG).read_text()))
    with torch.device("meta"):
        model = LM(config.with_backend(backend))
    path = parameters_file(folder)
    with naming(path):
        parameters = read_parameters(path)
    try:
        model.load_state_dict(parameters, assign=True)
    except RuntimeError as error:
        # torch lists every tensor that does not fit, each on a line of its own.
        raise ValueError(f"{path} does not fit {CONFIG}: {shorten(str(error), 300)}") from error
    return model.to(device).eval()


def parameters_file(folder: Path) -> Path:
    if (folder / SAFE).is_file():
        return folder / SAFE
    require((folder / PLAIN).is_file(), "folder", str(folder), f"a folder with {SAFE} or {PLAIN}")
    return folder / PLAIN


def read_parameters(path: Path) -> dict[str, Tensor]:
    if path.name == PLAIN:
        return torch.load(path, map_location="cpu", weights_only=True)
    try:
        return import_module("safetensors.torch").load_file(path)
    except import_module("safetensors").SafetensorError as error:
        raise ValueError(str(error)) from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Whatever a reader makes of a file that was cut or changed, the message says which one it is."""
    try:
        yield
    except (ValueError, TypeError, KeyError, RuntimeError, EOFError, UnpicklingError) as error:
        raise ValueError(f"{path} is damaged: {shorten(str(error), 300)}") from error
