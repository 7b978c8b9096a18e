"""The libraries that compute FlashAttention: found by distribution name, called with keyword arguments only.

A library is imported by its first call, never by looking for it. Every call is checked against the library's contract
first; what a library rejects all the same becomes a `BackendFailure`, and the next backend runs. That the results have
the expected shapes, dtypes and values is for the probe to find out, once per version.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from nsa.backends.flash.contracts import FLASH_ATTN_2, TORCH, Call, Contract, violations
from nsa.backends.routing import BackendFailure, CallUnsupported

log = logging.getLogger("nsa")

# What Python code around kernels raises: its own checks, names and arguments of another version, shared objects that
# cannot be loaded.
PYTHON_ERRORS = (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, NameError, LookupError)
LIBRARY_ERRORS = (*PYTHON_ERRORS, ArithmeticError, ImportError, OSError, EOFError, SystemError)
# Versions of flash_attn whose calls are known: from the first to below the second.
FLASH_ATTN_VERSIONS = ((2, 7), (3, 0))


class Library(Protocol):
    """`forward` returns `o` and the natural-log `lse`, `[B,H,S]` or `[H,tokens]`; `backward` returns `dq, dk, dv`.

    `address`, as "package.module:name", lets another process build the same library. `obstacle`: why the contract does
    not hold in this process; None if it does.
    """

    contract: Contract
    version: str
    address: str

    def obstacle(self) -> str | None: ...
    def forward(self, call: Call) -> tuple[Tensor, Tensor]: ...
    def backward(self, call: Call) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass
class TorchLibrary:
    """FlashAttention-2 as torch ships it. dQ is bitwise deterministic under `torch.use_deterministic_algorithms`."""

    version: str = str(torch.__version__)
    contract: Contract = TORCH
    address: str = f"{__name__}:TorchLibrary"

    def obstacle(self) -> str | None:
        """Torch lets another implementation replace its own, with other limits."""
        current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
        other = current() if current is not None else None
        return None if other is None else f"{other} replaces its kernels: restore_flash_attention_impl() undoes it"

    def shared(self, call: Call) -> dict[str, Any]:
        left, right = call.window_size
        given: dict[str, Any] = {"query": call.q, "key": call.k, "value": call.v, "scale": call.scale}
        given |= {"cum_seq_q": call.cu_seqlens_q, "cum_seq_k": call.cu_seqlens_k, "dropout_p": 0.0}
        given |= {"max_q": call.max_q or call.q.shape[1], "max_k": call.max_k or call.k.shape[1]}
        return given | {"is_causal": call.causal, "window_size_left": left, "window_size_right": right}

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        used = {} if call.used_k is None else {"seqused_k": call.used_k}
        function = torch.ops.aten._flash_attention_forward.default
        o, lse, *_ = function(return_debug_mask=False, **self.shared(call), **used)
        return o, lse

    def backward(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout no random state is read.
        no_state = torch.empty(2, dtype=torch.uint64, device=call.q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward.default(
            grad_out=call.do, out=call.o, logsumexp=call.lse, rng_state=no_state, unused=no_state, **self.shared(call)
        )
        return dq, dk, dv


@dataclass
class FlashAttn2Library:
    """The flash_attn package."""

    version: str
    contract: Contract = FLASH_ATTN_2
    address: str = f"{__name__}:import_flash_attn"

    def obstacle(self) -> str | None:
        return None

    def interface(self) -> ModuleType:
        return import_module("flash_attn.flash_attn_interface")

    def shared(self, call: Call) -> dict[str, Any]:
        left, right = call.window_size
        given: dict[str, Any] = {"q": call.q, "k": call.k, "v": call.v, "softmax_scale": call.scale}
        given |= {"causal": call.causal, "window_size_left": left, "window_size_right": right}
        given |= {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None}
        if call.varlen:
            given |= {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k}
            given |= {"max_seqlen_q": call.max_q, "max_seqlen_k": call.max_k}
        return given

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        interface = self.interface()
        function = interface._flash_attn_varlen_forward if call.varlen else interface._flash_attn_forward
        used = {} if call.used_k is None else {"seqused_k": call.used_k}
        o, lse, *_ = function(return_softmax=False, **self.shared(call), **used)
        return o, lse

    def backward(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        interface = self.interface()
        function = interface._flash_attn_varlen_backward if call.varlen else interface._flash_attn_backward
        found = {name: torch.empty_like(x) for name, x in (("dq", call.q), ("dk", call.k), ("dv", call.v))}
        saved = {"dout": call.do, "out": call.o, "softmax_lse": call.lse}
        function(**saved, **found, deterministic=torch.are_deterministic_algorithms_enabled(), **self.shared(call))
        return found["dq"], found["dk"], found["dv"]


def find_flash_attn() -> FlashAttn2Library | str:
    """The flash_attn package, not imported; or why it is not called."""
    try:
        found = version("flash-attn")
    except PackageNotFoundError:
        return "flash_attn is not installed"
    release = re.match(r"(\d+)\.(\d+)", found)
    oldest, below = FLASH_ATTN_VERSIONS
    if release is None or not oldest <= tuple(map(int, release.groups())) < below:
        return f"flash_attn is {found}, supported: {oldest[0]}.{oldest[1]} to below {below[0]}.{below[1]}"
    return FlashAttn2Library(found)


def import_flash_attn() -> FlashAttn2Library:
    """Import flash_attn at once. For the probe's child: importing is part of its start, not of its first call."""
    library = find_flash_attn()
    assert isinstance(library, FlashAttn2Library), library
    # The first call raises it again, under its own name.
    with suppress(*LIBRARY_ERRORS):
        library.interface()
    return library


def find_libraries() -> tuple[tuple[Library, ...], dict[str, str]]:
    """The libraries that can be called here, torch's own first because it is always there; and why not the others."""
    package = find_flash_attn()
    if isinstance(package, str):
        return (TorchLibrary(),), {"flash_attn": package}
    return (TorchLibrary(), package), {}


def capability_of(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def reasons_against(library: Library, call: Call) -> list[str]:
    """Why the call must not be made. Does not wait for the GPU."""
    obstacle = library.obstacle()
    return [*filter(None, [obstacle]), *violations(call, library.contract, capability_of(call.q.device))]


def call_library(library: Library, direction: str, call: Call) -> Any:
    """Make the call, or raise a `BackendFailure`. Running out of memory is for the caller to see."""
    name = library.contract.library
    found = reasons_against(library, call)
    if found:
        raise CallUnsupported(f"{name} was not called: {'; '.join(found)}")
    try:
        return getattr(library, direction)(call)
    except torch.OutOfMemoryError:
        raise
    except ImportError as error:
        raise BackendFailure(f"{name} {library.version} cannot be imported: {error}") from error
    except LIBRARY_ERRORS as error:
        # Failures are counted by their text: what changes from call to call is logged separately.
        log.info("nsa: %s %s failed on %s", name, direction, call)
        raise BackendFailure(f"{name} {library.version} {direction}: {type(error).__name__}: {error}") from error
