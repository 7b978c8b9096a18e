"""Layers that replay their passes as CUDA graphs: the same bits as the kernels launched one by one."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa import NSAAttention, NSAConfig, attention_replay, eager, ops
from nsa.backends.routing import router
from nsa.captures import CALLS_BEFORE, Captures
from nsa.eager import LayerReplay

CASES: dict[str, dict[str, Any]] = {
    "mlp": {"phi": "mlp"},
    "mean": {"phi": "mean"},
    "shared": {"share_kv": True, "gate": "softmax", "phi": "mlp"},
}


def new_layer(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> NSAAttention:
    torch.manual_seed(0)
    return NSAAttention(NSAConfig(dim=384, n_heads=6, n_kv_groups=2, d_k=64, d_v=64, **changes)).to("cuda", dtype)


def draw(batch: int, length: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(batch, length, 384, device="cuda", dtype=dtype)


def run(layer: NSAAttention, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y) * y.detach().cos())]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`with launched():` kernels are launched one by one."""

    class Off:
        def __enter__(self) -> None:
            monkeypatch.setattr(eager, "MAX_LAYER", 0)
            monkeypatch.setattr(attention_replay, "MAX_ATTENTION", 0)

        def __exit__(self, *_: object) -> None:
            monkeypatch.undo()

    return Off


def replayed(layer: NSAAttention, x: Tensor) -> list[Tensor]:
    for _ in range(CALLS_BEFORE + 1):
        run(layer, x)
    before = router().counts.calls["graph", "replay"]
    found = run(layer, x)
    assert router().counts.calls["graph", "replay"] == before + 2
    return found


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [i for i, (x, y) in enumerate(zip(found, expected, strict=True)) if not torch.equal(x, y)] == []


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "autocast"])
@pytest.mark.parametrize("size", [(1, 1), (1, 33), (2, 1001), (1, 4096)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_replays_to_the_bit(case: str, size: tuple[int, int], dtype: str, launched: Any) -> None:
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    layer = new_layer(kind, **CASES[case])
    x, other = draw(*size, kind), draw(*size, kind)
    with torch.autocast("cuda", torch.bfloat16) if dtype == "autocast" else nullcontext():
        with launched():
            expected = [run(layer, x), run(layer, other)]
        assert_same_bits(replayed(layer, x), expected[0])
        assert_same_bits(run(layer, other), expected[1])


def test_a_stack_of_layers_with_residuals(launched: Any) -> None:
    layers = [new_layer(phi="mlp") for _ in range(4)]
    parameters = [p for layer in layers for p in layer.parameters()]

    def run_stack(x: Tensor) -> list[Tensor]:
        y = x = x.detach().requires_grad_()
        for layer in layers:
            y = y + layer(y)
        return [y.detach(), *torch.autograd.grad(y.float().square().mean(), [x, *parameters])]

    inputs = [draw(2, 515) for _ in range(3)]
    with launched():
        expected = [run_stack(x) for x in inputs]
    for _ in range(CALLS_BEFORE + 2):
        for x, wanted in zip(inputs, expected, strict=True):
            assert_same_bits(run_stack(x), wanted)


def test_streams_have_memory_of_their_own(launched: Any) -> None:
    layer = new_layer(phi="mlp")
    inputs = [draw(1, 700) for _ in range(4)]
    with launched():
        expected = [run(layer, x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(CALLS_BEFORE + 4):
        found = []
        torch.cuda.synchronize()
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(layer, x))
        torch.cuda.synchronize()
        for one, wanted in zip(found, expected, strict=True):
            assert_same_bits(one, wanted)


def test_threads_take_turns(launched: Any) -> None:
    layer = new_layer(phi="mlp")
    inputs = [draw(1, 300) for _ in range(4)]
    with launched():
        expected = [run(layer, x) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            if any(not torch.equal(a, b) for a, b in zip(run(layer, inputs[i]), expected[i], strict=True)):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_users_graph_holds_the_kernels(launched: Any) -> None:
    layer, x = new_layer(phi="mlp"), draw(1, 300)
    with torch.no_grad():
        expected = [layer(x) for _ in range(CALLS_BEFORE + 2)][-1]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(draw(1, 300))
        graph.replay()
        with launched():
            assert torch.equal(y, layer(x))
    assert not torch.equal(y, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_agrees(reentrant: bool, launched: Any) -> None:
    layer, x = new_layer(phi="mlp"), draw(1, 300)
    with launched():
        leaf = x.clone().requires_grad_()
        layer(leaf).sum().backward()
        expected = leaf.grad
    for _ in range(CALLS_BEFORE + 3):
        leaf = x.clone().requires_grad_()
        checkpoint(layer, leaf, use_reentrant=reentrant).sum().backward()
        assert torch.equal(leaf.grad, expected)


def test_memory_is_shared_and_goes_with_the_layer() -> None:
    """A second layer of the same shape needs its graphs alone; without layers, captures go."""
    x = draw(2, 1001)
    layers = [new_layer(phi="mlp") for _ in range(6)]
    used = []
    for layer in layers:
        replayed(layer, x)
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_reserved())
    assert used[-1] - used[1] <= 64 << 20
    kept = [one for layer in layers for one in layer.captures.shapes.values()]
    assert all(isinstance(one, LayerReplay) for one in kept)
    twin = copy.deepcopy(layers[0])
    assert not twin.captures.shapes
    del layers, layer, kept
    gc.collect()
    assert_same_bits(replayed(twin, x), run(twin, x))


def test_an_optimizer_steps_between_replays(launched: Any) -> None:
    """Losses of a short training, equal with and without."""

    def train() -> list[float]:
        layer = new_layer(torch.float32, phi="mlp")
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
        torch.manual_seed(3)
        losses = []
        for _ in range(12):
            x = draw(2, 257, torch.float32)
            loss = (layer(x.requires_grad_()) - x.detach().roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        return losses

    with launched():
        expected = train()
    assert train() == expected


@pytest.mark.parametrize("change", ["transposed", "tf32"])
def test_changes_that_move_no_parameter_count(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = new_layer(torch.float32), draw(1, 300, torch.float32)
    replayed(layer, x)
    if change == "transposed":
        layer.q_proj.weight.data = layer.q_proj.weight.data.t()
    else:
        monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    found = run(layer, x)
    # Counts anew, so this call launches its kernels.
    layer.captures = Captures()
    assert_same_bits(found, run(layer, x))


def test_a_layer_is_freed_without_the_garbage_collector() -> None:
    layer, x = new_layer(), draw(1, 300)
    replayed(layer, x)
    layer_ref = ref(layer)
    gc.disable()
    try:
        del layer
        assert layer_ref() is None
    finally:
        gc.enable()


def attend(inputs: list[Tensor]) -> list[Tensor]:
    sizes = {"block": 32, "stride": 16, "select_block": 64, "n_select": 4, "n_init": 1, "n_local": 2, "window": 100}
    o, indices = ops.attention(*inputs, **sizes)
    return [o.detach(), indices, *torch.autograd.grad(o, inputs, o.detach().cos())]


@pytest.mark.parametrize("strided", [False, True])
def test_attention_is_replayed_to_the_bit(strided: bool, launched: Any) -> None:
    n_cmp = (777 - 32) // 16 + 1
    shapes = [(777, 6, 64), *[(n_cmp, 2, 64)] * 2, *[(777, 2, 64)] * 4, (777, 6, 3)]

    def draw_inputs() -> list[Tensor]:
        drawn = [torch.rand(2, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
        if strided:
            drawn[3:7] = torch.rand(2, 777, 8, 64, device="cuda", dtype=torch.bfloat16).split(2, dim=2)
        return [x.detach().requires_grad_() for x in drawn]

    batches = [draw_inputs() for _ in range(3)]
    with launched():
        expected = [attend(inputs) for inputs in batches]
    for _ in range(CALLS_BEFORE + 2):
        for inputs, wanted in zip(batches, expected, strict=True):
            assert_same_bits(attend(inputs), wanted)
    assert router().counts.calls["graph", "replay"] > 0
