"""A model in a folder: `model.json` says what it is, `model.safetensors` holds its parameters.

`model.pt`, which earlier versions wrote where safetensors was not installed, is read with `weights_only=True`: neither
format can run code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from textwrap import shorten

import torch
from torch import Tensor

from nsa.config import require
from nsa.files import make_folder, parse_json, read_limited, replace_text
from nsa.model.config import LMConfig
from nsa.model.transformer import LM
from nsa.tensor_file import read_tensors, write_tensors

CONFIG, SAFE, PLAIN = "model.json", "model.safetensors", "model.pt"
MAX_CONFIG_BYTES = 2**20


def save_model(model: LM, folder: Path) -> Path:
    """Write the model into `folder`, durably, and return the file with its parameters."""
    make_folder(folder)
    path = folder / SAFE
    write_tensors(path, {name: x.detach().cpu().contiguous() for name, x in model.state_dict().items()})
    replace_text(folder / CONFIG, json.dumps(model.config.to_dict(), indent=2) + "\n")
    return path


def load_model(folder: Path, device: torch.device | str = "cpu", *, backend: str = "auto") -> LM:
    """The model of `folder`, ready to generate. Who computes it is decided here: it was trained on another machine.

    Raises:
        ValueError: A file is missing, damaged, or does not fit the other; the message names it.
    """
    require((folder / CONFIG).is_file(), "folder", str(folder), f"a folder with {CONFIG}, as `nsa train` writes it")
    with naming(folder / CONFIG):
        config = LMConfig.from_dict(parse_json(read_limited(folder / CONFIG, MAX_CONFIG_BYTES)))
    path = parameters_file(folder)
    parameters = read_parameters(path)
    # Every layer has parameters: a number of layers that the file does not have is refused before they are built.
    require(config.n_layers <= len(parameters), f"n_layers in {folder / CONFIG}", config.n_layers, f"what {path} holds")
    with naming(folder / CONFIG), torch.device("meta"):
        model = LM(config.with_backend(backend))
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
    if path.name == SAFE:
        return read_tensors(path)
    with naming(path):
        found = torch.load(path, map_location="cpu", weights_only=True)
        tensors = isinstance(found, dict) and all(
            isinstance(name, str) and isinstance(x, Tensor) for name, x in found.items()
        )
        require(tensors, "its content", type(found).__name__, "a dictionary of tensors by name")
    return found


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Whatever a reader makes of a file that was cut or changed, the message says which one it is."""
    try:
        yield
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError, EOFError, UnpicklingError) as error:
        raise ValueError(f"{path} is damaged: {shorten(str(error), 300)}") from error
