"""The libraries that compute FlashAttention: found by distribution name, called with keyword arguments only.

A library is imported by the first call, never by looking for it. Every call is held against the library's contract
first; what a library refuses all the same becomes a reason for the next backend.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from nsa.backends.contracts import FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4, TORCH, Call, Contract, violations
from nsa.backends.routing import BackendFailure, CallRefused

log = logging.getLogger("nsa")

# What Python code around kernels raises: checks of its own, names and arguments of another version, shared objects that
# cannot be loaded.
LIBRARY_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    AssertionError,
    AttributeError,
    NameError,
    LookupError,
    ArithmeticError,
    ImportError,
    OSError,
    EOFError,
    SystemError,
)


class Library(Protocol):
    """`forward` gives `o` and the natural `lse`, `[B,H,S]` or `[H,tokens]`; `backward` gives `dq, dk, dv`.

    `address`, as in `package.module:Name`, lets another process build the same one.
    """

    @property
    def contract(self) -> Contract: ...

    @property
    def version(self) -> str: ...

    @property
    def address(self) -> str: ...

    def obstacle(self) -> str | None:
        """What in this process keeps it from being what its contract says; None as a rule."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]: ...

    def backward(self, call: Call) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True)
class TorchLibrary:
    """The FlashAttention-2 that torch carries. Repeats dQ to the bit under `torch.use_deterministic_algorithms`."""

    version: str = str(torch.__version__)
    contract: Contract = TORCH
    address: str = f"{__name__}:TorchLibrary"

    def obstacle(self) -> str | None:
        """Torch lets another implementation take the place of its own, with limits of its own."""
        current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
        other = current() if current is not None else None
        return (
            None if other is None else f"its kernels are replaced by {other}: restore_flash_attention_impl() undoes it"
        )

    def shared(self, call: Call) -> dict[str, Any]:
        left, right = call.window_size
        return {
            "query": call.q,
            "key": call.k,
            "value": call.v,
            "cum_seq_q": call.cu_seqlens_q,
            "cum_seq_k": call.cu_seqlens_k,
            "max_q": call.max_q if call.max_q is not None else call.q.shape[1],
            "max_k": call.max_k if call.max_k is not None else call.k.shape[1],
            "dropout_p": 0.0,
            "is_causal": call.causal,
            "scale": call.scale,
            "window_size_left": left,
            "window_size_right": right,
        }

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        used = {} if call.used_k is None else {"seqused_k": call.used_k}
        o, lse, *_ = torch.ops.aten._flash_attention_forward.default(
            return_debug_mask=False, **self.shared(call), **used
        )
        return o, lse

    def backward(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout no random state is read.
        no_state = torch.empty(2, dtype=torch.uint64, device=call.q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward.default(
            grad_out=call.do, out=call.o, logsumexp=call.lse, rng_state=no_state, unused=no_state, **self.shared(call)
        )
        return dq, dk, dv


@dataclass(frozen=True)
class FlashAttn2Library:
    """The flash_attn package. From 2.7 on its functions return what is unpacked here, a window is two numbers."""

    version: str
    contract: Contract = FLASH_ATTN_2
    address: str = f"{__name__}:import_flash_attn"

    def obstacle(self) -> str | None:
        return None

    def interface(self) -> ModuleType:
        return import_module("flash_attn.flash_attn_interface")

    def shared(self, call: Call) -> dict[str, Any]:
        left, right = call.window_size
        given: dict[str, Any] = {
            "q": call.q,
            "k": call.k,
            "v": call.v,
            "dropout_p": 0.0,
            "softmax_scale": call.scale,
            "causal": call.causal,
            "window_size_left": left,
            "window_size_right": right,
            "softcap": 0.0,
            "alibi_slopes": None,
        }
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
        dq, dk, dv = (torch.empty_like(x) for x in (call.q, call.k, call.v))
        function(
            dout=call.do,
            out=call.o,
            softmax_lse=call.lse,
            dq=dq,
            dk=dk,
            dv=dv,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self.shared(call),
        )
        return dq, dk, dv


# Where a library may come from, the versions whose behaviour is known, and whether this version of nsa calls it.
@dataclass(frozen=True)
class Package:
    contract: Contract
    distributions: tuple[str, ...]
    oldest: tuple[int, int]
    below: tuple[int, int]
    called: bool


FLASH_ATTN_PACKAGE = Package(FLASH_ATTN_2, ("flash-attn",), (2, 7), (3, 0), called=True)
PACKAGES = (
    FLASH_ATTN_PACKAGE,
    Package(FLASH_ATTN_3, ("flash-attn-3",), (3, 0), (4, 0), called=False),
    Package(FLASH_ATTN_4, ("flash-attn-4",), (4, 0), (5, 0), called=False),
)


def installed_version(package: Package) -> str | None:
    for distribution in package.distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def reason_against(package: Package, found: str | None) -> str | None:
    """None when the package can be called."""
    name = package.contract.library
    if found is None:
        return f"{name} is not installed"
    release = re.match(r"(\d+)\.(\d+)", found)
    numbers = tuple(map(int, release.groups())) if release else (0, 0)
    if not package.oldest <= numbers < package.below:
        oldest, below = (".".join(map(str, x)) for x in (package.oldest, package.below))
        return f"{name} is {found}, its calls are known from {oldest} to below {below}"
    return None if package.called else f"{name} {found} is installed, this version of nsa does not call it"


def find_flash_attn() -> FlashAttn2Library:
    found = installed_version(FLASH_ATTN_PACKAGE)
    reason = reason_against(FLASH_ATTN_PACKAGE, found)
    if reason is not None or found is None:
        raise BackendFailure(reason)
    return FlashAttn2Library(found)


def import_flash_attn() -> FlashAttn2Library:
    """For a process that makes nothing but calls: importing is part of its start, not of its first call."""
    library = find_flash_attn()
    # That call raises it again, and says so with its own name.
    with suppress(*LIBRARY_ERRORS):
        library.interface()
    return library


def find_libraries() -> tuple[tuple[Library, ...], dict[str, str]]:
    """What can be called here, torch's own first because it is there and was tested; and why not the others."""
    absent = {package.contract.library: reason_against(package, installed_version(package)) for package in PACKAGES}
    libraries: list[Library] = [TorchLibrary()]
    if absent["flash_attn"] is None:
        libraries.append(find_flash_attn())
    return tuple(libraries), {name: reason for name, reason in absent.items() if reason is not None}


def load(address: str) -> Library:
    """The library that `address` names, as another process passed it on."""
    module, _, name = address.partition(":")
    return getattr(import_module(module), name)()


def capability_of(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def refusals(library: Library, call: Call) -> Iterator[str]:
    """Why the call must not be made. Costs no wait for the device."""
    obstacle = library.obstacle()
    if obstacle is not None:
        yield obstacle
    yield from violations(call, library.contract, capability_of(call.q.device))


def run_forward(library: Library, call: Call) -> tuple[Tensor, Tensor]:
    return guarded(library, call, "forward")


def run_backward(library: Library, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    return guarded(library, call, "backward")


def guarded(library: Library, call: Call, direction: str) -> Any:
    """Make the call, or say why not. Running out of memory is the caller's to know, not another backend's to hide."""
    name = library.contract.library
    found = list(refusals(library, call))
    if found:
        raise CallRefused(f"{name} was not called: {'; '.join(found)}")
    try:
        results = getattr(library, direction)(call)
        check_results(call, direction, results)
    except torch.OutOfMemoryError:
        raise
    except ImportError as error:
        raise BackendFailure(f"{name} {library.version} cannot be imported: {error}") from error
    except LIBRARY_ERRORS as error:
        # Failures are counted by their text: what changes from call to call is logged beside it.
        log.info("nsa: %s %s failed on %s", name, direction, call)
        raise BackendFailure(f"{name} {library.version} {direction}: {type(error).__name__}: {error}") from error
    return results


def check_results(call: Call, direction: str, results: tuple[Tensor, ...]) -> None:
    """Another version may return other things: what is not what was asked for is not computed with."""
    kind = call.q.dtype
    if direction == "forward":
        rows = call.q.shape[:-1]
        # `[H,tokens]`, or `[B,H,S]`.
        lse = (*rows[:-2], rows[-1], rows[-2])
        expected = {"o": ((*rows, call.v.shape[-1]), kind), "lse": (lse, torch.float32)}
    else:
        expected = {"dq": (call.q.shape, kind), "dk": (call.k.shape, kind), "dv": (call.v.shape, kind)}
    for (name, (shape, dtype)), x in zip(expected.items(), results, strict=True):
        if x.shape != shape or x.dtype != dtype:
            raise ValueError(f"{name} is {tuple(x.shape)} of {x.dtype}, not {tuple(shape)} of {dtype}")
