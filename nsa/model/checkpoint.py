"""A model in a folder: `model.json` says what it is, `model.safetensors` (or `model.pt`) holds its parameters.

safetensors where it is installed, else torch's own format, read with `weights_only=True`: neither can run code.
"""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from nsa.config import require
from nsa.model.transformer import LM, LMConfig

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
    config = LMConfig.from_dict(json.loads((folder / CONFIG).read_text())).with_backend(backend)
    with torch.device("meta"):
        model = LM(config)
    model.load_state_dict(read_parameters(folder), assign=True)
    return model.to(device).eval()


def read_parameters(folder: Path) -> dict[str, Tensor]:
    if (folder / SAFE).is_file():
        return import_module("safetensors.torch").load_file(folder / SAFE)
    require((folder / PLAIN).is_file(), "folder", str(folder), f"a folder with {SAFE} or {PLAIN}")
    return torch.load(folder / PLAIN, map_location="cpu", weights_only=True)
