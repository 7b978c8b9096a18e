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
        values = parse_json(read_limited(folder / CONFIG, MAX_CONFIG_BYTES))
    path = parameters_file(folder)
    parameters = read_parameters(path)
    with naming(folder / CONFIG), torch.device("meta"):
        # Every layer has parameters. Refused before anything is built for so many.
        n_layers, most = values.get("n_layers"), len(parameters)
        require(
            not isinstance(n_layers, int) or n_layers <= most, "n_layers", n_layers, f"at most {most} for {path.name}"
        )
        model = LM(LMConfig.from_dict(values).with_backend(backend))
    try:
        # Copies: pages of a mapped file that somebody truncates later end the process with SIGBUS.
        owned = {name: x.to(device, copy=True) for name, x in parameters.items()}
        model.load_state_dict(owned, assign=True)
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
