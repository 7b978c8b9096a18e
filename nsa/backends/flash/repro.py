"""A failed case of a probe as a single script that needs only torch and the library.

The script holds the source of the code that made the call and of the comparison: it makes the same call, and ends with
a non-zero status if the library crashes, raises or is wrong.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict
from typing import Any

from nsa.backends.flash import libraries, probe_child
from nsa.backends.flash.cases import make_call
from nsa.backends.flash.contracts import Call
from nsa.backends.flash.libraries import Library
from nsa.backends.flash.probe import Outcome, Subject

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

CASE = json.loads({request!r})
DEVICE = sys.argv[1] if len(sys.argv) > 1 else {device!r}
Contract, TORCH, FLASH_ATTN_2, Library = object, None, None, object
{constants}
'''
# Compares a library's results with attention in plain torch.
CHECKS = (
    probe_child.flat_rows, probe_child.sequences, probe_child.tiles, probe_child.attend_tile,
    probe_child.expected_results, probe_child.synchronize, probe_child.compute, probe_child.difference,
)  # fmt: skip
CONSTANTS = ("ROUNDINGS", "TILE_SCORES", "TILE_QUERIES")
FOOTER = """
def begin(stage, given):
    print(stage, given, flush=True)
    return True


if __name__ == "__main__":
    faulthandler.enable()
    print("torch", torch.__version__, "CUDA", torch.version.cuda, "library", library.version, "on", DEVICE)
    call = make_call(CASE, DEVICE)
    found, do = compute(library, call, backward=CASE["backward"], begin=begin)
    problem = difference(call, found, do)
    if problem:
        sys.exit(f"wrong: {problem}")
    print("survived, and right")
"""


def repro_script(library: Library, subject: Subject, outcome: Outcome) -> str:
    where = {name: in_docstring(value) for name, value in asdict(subject).items()}
    header = HEADER.format(
        library=where["library"],
        version=where["version"],
        case=in_docstring(outcome.case),
        problem=in_docstring(" ".join((outcome.problem or "right").split())),
        subject="\n".join(f"  {name} {value}" for name, value in where.items()),
        call=in_docstring(outcome.call or "not made"),
        request=json.dumps(dict(outcome.request)),
        device=library.contract.device,
        constants="\n".join(f"{name} = {getattr(probe_child, name)}" for name in CONSTANTS),
    )
    kind, made = type(library), f"library = {type(library).__name__}"
    parts: list[Any] = [Call, make_call, *CHECKS]
    if kind.__module__ == libraries.__name__:
        parts, ours = [*parts, kind], f"{made}(version={library.version!r})"
    else:
        ours = f"from {kind.__module__} import {kind.__name__}\n\n{made}()"
    return "\n\n\n".join([header, *map(inspect.getsource, parts), ours, FOOTER.lstrip()])


def in_docstring(text: str) -> str:
    """`text` escaped for a docstring: paths with backslashes, quotes, odd bytes."""
    return text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
