"""A failed case of a probe as one file that shows it anywhere: torch and the library are all it needs.

The file holds the source of the code that made the call, so it makes the same one.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict
from textwrap import indent

from nsa.backends.contracts import Call
from nsa.backends.flash import libraries
from nsa.backends.flash.libraries import Library
from nsa.backends.flash.trial import make_call
from nsa.backends.probe import Outcome, Subject

HEADER = '''"""{library} {version}, case "{case}": {problem}

Seen on:
{subject}
The call:
  {call}

Run it as: python THIS_FILE [DEVICE]
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

CASE = json.loads("""{request}""")
DEVICE = sys.argv[1] if len(sys.argv) > 1 else {device!r}
Contract, TORCH, FLASH_ATTN_2 = object, None, None
'''

FOOTER = """
if __name__ == "__main__":
    faulthandler.enable()
    print("torch", torch.__version__, "CUDA", torch.version.cuda, "library", library.version, "on", DEVICE)
    call = make_call(CASE, DEVICE)
    print(call, flush=True)
    o, lse = library.forward(call)
    print("forward: finite", bool(o.isfinite().all()), flush=True)
    if CASE["backward"]:
        gradients = library.backward(replace(call, do=torch.randn_like(o), o=o, lse=lse.contiguous()))
        print("backward: finite", all(bool(x.isfinite().all()) for x in gradients), flush=True)
    print("survived")
"""


def library_source(library: Library) -> str:
    """How the script gets the library: its source where it is ours, an import where it is not."""
    kind = type(library)
    if kind.__module__ != libraries.__name__:
        return f"from {kind.__module__} import {kind.__name__}\n\nlibrary = {kind.__name__}()\n"
    return f"{inspect.getsource(kind)}\n\nlibrary = {kind.__name__}(version={library.version!r})\n"


def repro_script(library: Library, subject: Subject, outcome: Outcome) -> str:
    header = HEADER.format(
        library=subject.library,
        version=subject.version,
        case=outcome.case,
        problem=one_line(outcome.problem or "right"),
        subject=indent("\n".join(f"{name} {value}" for name, value in asdict(subject).items()), "  "),
        call=outcome.call or "not made",
        request=json.dumps(dict(outcome.request)),
        device=library.contract.device,
    )
    parts = [header, inspect.getsource(Call), inspect.getsource(make_call), library_source(library)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n\n" + FOOTER


def one_line(text: str) -> str:
    return " ".join(text.split()).replace('"""', "'''")
