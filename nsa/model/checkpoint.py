"""Models on disk: a folder with `model.json`, the config, and `model.safetensors`, the parameters.

`model.pt`, which earlier versions wrote without safetensors, is loaded with `weights_only=True`: neither format can
execute code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from nsa.config import require
from nsa.files import make_folder, parse_json, read_limited, replace_text
from nsa.model.config import LMConfig
from nsa.model.transformer import LM
from nsa.tensor_file import read_tensors, read_tensors_and_metadata, write_tensors

MODEL_CONFIG, SAFETENSORS, TORCH_FILE = "model.json", "model.safetensors", "model.pt"
MAX_CONFIG_BYTES = 2**20


def save_model(model: LM, folder: Path, *, step: int | None = None) -> Path:
    """Save a model durably.

    Args:
        model: Its config and parameters are saved.
        folder: Created if it does not exist.
        step: The training step that it is of, for `saved_step`.

    Returns:
        The file with the parameters.
    """
    make_folder(folder)
    path = folder / SAFETENSORS
    tensors = {name: x.detach().cpu().contiguous() for name, x in model.state_dict().items()}
    write_tensors(path, tensors, None if step is None else {"step": str(step)})
    replace_text(folder / MODEL_CONFIG, json.dumps(model.config.to_dict(), indent=2) + "\n")
    return path


def read_model_values(folder: Path) -> dict[str, Any]:
    """What the `model.json` of a run or its export holds; a ValueError if it is missing or not JSON."""
    path = folder / MODEL_CONFIG
    require(path.is_file(), "folder", str(folder), f"a folder with {MODEL_CONFIG}, as `nsa train` writes it")
    with name_in_errors(path):
        return parse_json(read_limited(path, MAX_CONFIG_BYTES))


def saved_step(folder: Path) -> int | None:
    """The training step that a saved model is of; None where it was not recorded. A ValueError names a damaged file."""
    path = parameters_file(folder)
    step = read_tensors_and_metadata(path)[1].get("step") if path.name == SAFETENSORS else None
    return int(step) if isinstance(step, str) and step.isdecimal() else None


def load_model(folder: Path, device: torch.device | str = "cpu", *, backend: str = "auto") -> LM:
    """Load a model that `save_model` wrote.

    Args:
        folder: Holds `model.json` and the parameters.
        device: Where to put the parameters.
        backend: Replaces the backend of the config, because the model may have been trained on another machine.

    Returns:
        The model in eval mode.

    Raises:
        ValueError: A file is missing, damaged, or does not match the other; the message names it.
    """
    values = read_model_values(folder)
    path = parameters_file(folder)
    parameters = read_parameters(path)
    with name_in_errors(folder / MODEL_CONFIG), torch.device("meta"):
        # Every layer has parameters: an absurd number is refused before any layer is built.
        n_layers, most = values.get("n_layers"), len(parameters)
        fits = not isinstance(n_layers, int) or n_layers <= most
        require(fits, "n_layers", n_layers, f"at most {most} for {path.name}")
        model = LM(LMConfig.from_dict(values).with_backend(backend))
    try:
        # Copies: reading a mapped file that is truncated later would raise SIGBUS.
        owned = {name: x.to(device, copy=True) for name, x in parameters.items()}
        model.load_state_dict(owned, assign=True)
    except RuntimeError as error:
        # torch lists every mismatched tensor on its own line.
        raise ValueError(f"{path} does not fit {MODEL_CONFIG}: {shorten(str(error), 300)}") from error
    return model.to(device).eval()


def load_parameters(model: LM, folder: Path) -> None:
    """Copy the parameters that `save_model` wrote into a model with the same ones; its config may differ otherwise. A
    ValueError names a file that is missing, damaged, or does not fit."""
    path = parameters_file(folder)
    try:
        model.load_state_dict(read_parameters(path))
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model: {shorten(str(error), 300)}") from error


def parameters_file(folder: Path) -> Path:
    if (folder / SAFETENSORS).is_file():
        return folder / SAFETENSORS
    require((folder / TORCH_FILE).is_file(), "folder", str(folder), f"a folder with {SAFETENSORS} or {TORCH_FILE}")
    return folder / TORCH_FILE


def read_parameters(path: Path) -> dict[str, Tensor]:
    if path.name == SAFETENSORS:
        return read_tensors(path)
    with name_in_errors(path):
        found = torch.load(path, map_location="cpu", weights_only=True)
        pairs = found.items() if isinstance(found, dict) else [(None, None)]
        tensors = all(isinstance(name, str) and isinstance(x, Tensor) for name, x in pairs)
        require(tensors, "its content", type(found).__name__, "a dictionary of tensors by name")
    return found


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Errors of a reader become a ValueError that names the file."""
    try:
        yield
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError, EOFError, UnpicklingError) as error:
        raise ValueError(f"{path} is damaged: {shorten(str(error), 300)}") from error
