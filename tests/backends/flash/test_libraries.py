"""The calls that each FlashAttention library gets, and how it is found."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from flash_standin import StandIn
from helpers import Case, random_inputs
from test_flash import BRANCHES, PROBLEM, assert_equal_to_rounding, backend_of, by_backend, by_reference

from nsa.backends.flash import libraries as libraries_module
from nsa.backends.flash.contracts import FLASH_ATTN_2, TORCH, Call
from nsa.backends.flash.libraries import FlashAttn2Library, TorchLibrary, find_flash_attn, find_libraries
from nsa.backends.flash.libraries import call_library as run_library
from nsa.backends.routing import BackendFailure


def call_on(device: str, *, varlen: bool) -> Call:
    shape = (12,) if varlen else (2, 6)
    q = torch.zeros(*shape, 4, 8, dtype=torch.bfloat16, device=device)
    k = torch.zeros(*shape, 2, 8, dtype=torch.bfloat16, device=device)
    call = Call(q=q, k=k, v=k, scale=0.5, window=3)
    if varlen:
        offsets = torch.zeros(3, dtype=torch.int32, device=device)
        call = replace(call, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_q=12, max_k=12)
    return call


@pytest.mark.parametrize("varlen", [False, True], ids=["fixed", "varlen"])
def test_torch_s_kernels_are_called_as_their_schema_says(varlen: bool) -> None:
    """Meta tensors: names and shapes are checked by torch, nothing is computed."""
    call = call_on("meta", varlen=varlen)
    o, lse = TorchLibrary().forward(call)
    assert o.shape == call.q.shape
    assert lse.shape == ((4, 12) if varlen else (2, 4, 6))
    gradients = TorchLibrary().backward(replace(call, do=o, o=o, lse=lse))
    assert [x.shape for x in gradients] == [call.q.shape, call.k.shape, call.v.shape]
    names = {argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments}
    assert "seqused_k" in names
    assert set(TorchLibrary().shared(call)) <= names


def test_torch_s_kernels_are_not_called_when_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TorchLibrary().obstacle() is None
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False)
    library = TorchLibrary(contract=replace(TORCH, device="cpu", dtypes=(torch.float32,)))
    assert "FA4 replaces" in str(backend_of(library).supports(PROBLEM))
    x = torch.zeros(1, 4, 1, 8)
    with pytest.raises(BackendFailure, match="FA4 replaces"):
        run_library(library, "forward", Call(q=x, k=x, v=x, scale=1.0))


def fake_flash_attn(library: StandIn) -> ModuleType:
    """`flash_attn.flash_attn_interface` with the signatures of 2.8, computed by the stand-in."""

    def call_of(given: dict[str, Any]) -> Call:
        assert (given["dropout_p"], given["softcap"], given["alibi_slopes"]) == (0.0, 0.0, None)
        left, right = given["window_size_left"], given["window_size_right"]
        assert right == (0 if given["causal"] else -1)
        names = {"q": "q", "k": "k", "v": "v", "scale": "softmax_scale", "causal": "causal", "used_k": "seqused_k"}
        names |= {"cu_seqlens_q": "cu_seqlens_q", "cu_seqlens_k": "cu_seqlens_k"}
        names |= {"max_q": "max_seqlen_q", "max_k": "max_seqlen_k"}
        return Call(window=None if left < 0 else left + 1, **{ours: given.get(name) for ours, name in names.items()})

    def forward(given: dict[str, Any]) -> tuple[Any, ...]:
        return *library.forward(call_of(given)), None, None

    def backward(given: dict[str, Any]) -> None:
        call = replace(call_of(given), do=given["dout"], o=given["out"], lse=given["softmax_lse"])
        for target, found in zip((given["dq"], given["dk"], given["dv"]), library.backward(call), strict=True):
            target.copy_(found)

    interface = ModuleType("flash_attn.flash_attn_interface")

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        return forward(locals())

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        return forward(locals())

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        backward(locals())

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        backward(locals())

    forwards, backwards = (
        (_flash_attn_forward, _flash_attn_varlen_forward),
        (_flash_attn_backward, _flash_attn_varlen_backward),
    )
    for function in (*forwards, *backwards):
        setattr(interface, function.__name__, function)
    return interface


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("documents", [None, (5, 0, 60, 31)], ids=["fixed", "varlen"])
def test_the_flash_attn_package_matches_the_reference(
    branch: str, documents: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    interface = fake_flash_attn(StandIn())
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    contract = replace(FLASH_ATTN_2, device="cpu", dtypes=(torch.float32,))
    case = Case(length=96, groups=2, heads=3, d_k=8, d_v=8, documents=documents)
    inputs = random_inputs(case, torch.float32)
    found = by_backend(backend_of(FlashAttn2Library("2.8.3", contract)), branch, inputs, case, with_lse=False)
    assert_equal_to_rounding(found, by_reference(branch, inputs, case, with_lse=False))


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (None, "not installed"),
        ("2.8.3", None),
        ("2.7.0.post2", None),
        ("2.6.3", "2.6.3"),
        ("3.0.0", "3.0.0"),
        ("unknown", "unknown"),
    ],
)
def test_only_known_versions_of_flash_attn_are_called(
    version: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise libraries_module.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(libraries_module, "version", installed)
    found = find_flash_attn()
    assert found == FlashAttn2Library(str(version)) if expected is None else expected in str(found)


def test_the_probe_s_child_imports_flash_attn_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries_module, "version", lambda _: "2.8.3")
    imported = []

    def fake_import(name: str) -> ModuleType:
        imported.append(name)
        raise ImportError("undefined symbol")

    module, _, name = FlashAttn2Library("2.8.3").address.partition(":")
    find = getattr(sys.modules[module], name)
    monkeypatch.setattr(libraries_module, "import_module", fake_import)
    library = find()
    assert imported == ["flash_attn.flash_attn_interface"]
    with pytest.raises(ImportError):
        library.forward(call_on("cpu", varlen=False))


def test_looking_for_libraries_imports_none() -> None:
    before = set(sys.modules)
    assert find_libraries()[0][0].contract == TORCH
    assert not {name for name in set(sys.modules) - before if name.startswith("flash_attn")}
