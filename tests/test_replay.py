"""Layers that replay their passes: the same bits as without, whatever happens between calls.

Here a captured graph runs its function again, on its fixed memory, instead of launching a CUDA graph of it; the graphs
themselves are tested in `tests/gpu/test_replay_gpu.py`.
"""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary, ref

import pytest
import torch
from test_eager import VARIANTS, new_layer, results
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa import NSAAttention, ops, replay, settings
from nsa.attention_replay import AttentionReplay
from nsa.backends.routing import router
from nsa.captures import CALLS_BEFORE, MAX_CAPTURED, MAX_SHAPES, Captures
from nsa.eager import LayerReplay
from nsa.replay import SharedMemory
from nsa.rope import Rope


class RunAgain:
    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def replay(self) -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            self.function()


@pytest.fixture(autouse=True)
def replay_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedMemory(None, None, threading.RLock(), WeakValueDictionary(), threading.Event())  # type: ignore[arg-type]
    monkeypatch.setattr(replay, "capture_graph", lambda function, pool, stream: RunAgain(function))
    monkeypatch.setattr(replay, "DEVICE", "cpu")
    monkeypatch.setattr(replay, "current_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(replay, "memory", lambda device, stream: shared)
    monkeypatch.setattr(replay, "has_pools", lambda: True)
    monkeypatch.setattr(replay, "REPLAYABLE", ("sdpa",))


def captures(layer: NSAAttention) -> list[LayerReplay]:
    return [kept for kept in layer.captures.shapes.values() if isinstance(kept, LayerReplay)]


def replayed(layer: NSAAttention, x: Tensor, **given: Any) -> dict[str, Tensor]:
    """The results of a call that is replayed, both ways."""
    for _ in range(CALLS_BEFORE + 1):
        results(layer, x, **given)
    found = results(layer, x, **given)
    assert captures(layer)
    assert captures(layer)[-1].backward is not None
    return found


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [name for name, x in expected.items() if not torch.equal(found[name], x)] == []


@pytest.mark.parametrize("length", [37, 5], ids=["blocks", "no block"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_replays_to_the_bit(variant: str, length: int) -> None:
    layer = new_layer(torch.float32, **VARIANTS[variant])
    x, other = torch.randn(2, 2, length, 24).unbind()
    expected = [results(layer, x), results(layer, other)]
    layer.captures = Captures()
    assert_same_bits(replayed(layer, x), expected[0])
    assert_same_bits(results(layer, other), expected[1])


def test_calls_before_a_backward_pass_keep_their_own_tensors() -> None:
    layer = new_layer(torch.float32)
    inputs = torch.randn(3, 2, 37, 24).unbind()
    expected = [results(layer, x) for x in inputs]
    replayed(layer, inputs[0])
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = [layer(x) for x in leaves]
    for x, y, wanted in reversed(list(zip(leaves, outputs, expected, strict=True))):
        torch.manual_seed(1)
        (dx,) = torch.autograd.grad(y, [x], torch.randn_like(y))
        assert_same_bits({"y": y.detach(), "x": dx}, {"y": wanted["y"], "x": wanted["x"]})


def test_layers_of_one_shape_share_memory_and_nothing_else() -> None:
    layers = [new_layer(torch.float32), new_layer(torch.float32)]
    with torch.no_grad():
        for p in layers[1].parameters():
            p.mul_(1.5)
    x = torch.randn(2, 37, 24)
    expected = [results(layer, x) for layer in layers]
    for _ in range(2):
        for layer, wanted in zip(layers, expected, strict=True):
            assert_same_bits(replayed(layer, x), wanted)
    first, second = (captures(layer)[0] for layer in layers)
    assert all(x is y for x, y in zip(first.forward.inputs, second.forward.inputs, strict=True))
    assert all(x is y for x, y in zip(first.forward.outputs, second.forward.outputs, strict=True))


def test_new_values_of_the_parameters_are_used() -> None:
    layer, x = new_layer(torch.float32), torch.randn(1, 37, 24)
    before = replayed(layer, x)
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(0.5)
    found = results(layer, x)
    layer.captures = Captures()
    assert_same_bits(found, results(layer, x))
    assert not torch.equal(found["y"], before["y"])


def test_moved_parameters_are_captured_again() -> None:
    layer, x = new_layer(torch.float32), torch.randn(1, 37, 24)
    expected = replayed(layer, x)
    for p in layer.parameters():
        p.data = p.data.clone()
    assert_same_bits(results(layer, x), expected)
    assert_same_bits(replayed(layer, x), expected)
    assert len(captures(layer)) == 2


def test_captures_are_freed_where_the_layer_moves() -> None:
    layer, x = new_layer(torch.float32), torch.randn(1, 37, 24)
    replayed(layer, x)
    assert layer.double() is layer
    assert not captures(layer)


def test_parameters_that_move_before_backward_are_read_there() -> None:
    layer, x = new_layer(torch.float32), torch.randn(1, 37, 24)
    expected = replayed(layer, x)
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    for p in layer.parameters():
        p.data = p.data.clone()
    torch.manual_seed(1)
    (dx,) = torch.autograd.grad(y, [leaf], torch.randn_like(y))
    assert torch.equal(dx, expected["x"])


def test_modified_weights_raise_in_backward() -> None:
    layer, x = new_layer(torch.float32), torch.randn(1, 37, 24)
    replayed(layer, x)
    y = layer(x.clone().requires_grad_())
    with torch.no_grad():
        layer.k_proj.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


def test_second_derivatives_raise() -> None:
    layer, x = new_layer(torch.float32), torch.randn(1, 37, 24)
    replayed(layer, x)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).sum(), [x], create_graph=True)
    for leaf in (x, *layer.parameters()):
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(dx.sum() + leaf.sum(), [leaf], retain_graph=True)


def test_without_gradients_nothing_is_saved() -> None:
    layer, x = new_layer(torch.float32), torch.randn(2, 37, 24)
    with torch.no_grad():
        outputs = [layer(x) for _ in range(CALLS_BEFORE + 2)]
    assert all(torch.equal(y, outputs[0]) for y in outputs)
    assert len(captures(layer)[0].forward.outputs) == 1
    with torch.inference_mode():
        assert torch.equal(layer(x), outputs[0])


def test_autocast_is_part_of_the_shape() -> None:
    layer, x = new_layer(torch.float32), torch.randn(1, 37, 24)
    replayed(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        expected = results(layer, x)
        found = replayed(layer, x)
    assert found["y"].dtype == torch.bfloat16
    assert found["q_proj.weight"].dtype == torch.float32
    assert_same_bits(found, expected)


def test_shapes_that_never_repeat_are_not_captured() -> None:
    layer = new_layer(torch.float32)
    with torch.no_grad():
        for _ in range(CALLS_BEFORE + 2):
            for length in range(30, 31 + MAX_SHAPES):
                layer(torch.randn(1, length, 24))
    assert not captures(layer)
    assert len(layer.captures.shapes) == MAX_SHAPES


def test_a_layer_records_a_limited_number_of_times() -> None:
    layer, x = new_layer(torch.float32), torch.randn(1, 37, 24)
    with torch.no_grad():
        expected = layer(x)
        # All at once, so that no two lie in the same place.
        for weight in [layer.q_proj.weight.data.clone() for _ in range(MAX_CAPTURED + 3)]:
            layer.q_proj.weight.data = weight
            assert all(torch.equal(layer(x), expected) for _ in range(CALLS_BEFORE + 2))
    assert layer.captures.n_captured == MAX_CAPTURED
    assert len(layer.captures.shapes) <= MAX_SHAPES


def test_copies_and_pickles_leave_captures_out() -> None:
    layer, x = new_layer(torch.float32), torch.randn(1, 37, 24)
    expected = replayed(layer, x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert not twin.captures.shapes
        assert_same_bits(replayed(twin, x), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_agrees(reentrant: bool) -> None:
    layer, x = new_layer(torch.float32), torch.randn(1, 37, 24)
    expected = results(layer, x)
    for _ in range(CALLS_BEFORE + 3):
        leaf = x.clone().requires_grad_()
        y = checkpoint(layer, leaf, use_reentrant=reentrant)
        torch.manual_seed(1)
        y.backward(torch.randn_like(y))
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, expected["x"])


def test_padding_is_replayed_too() -> None:
    layer, x = new_layer(torch.float32), torch.randn(2, 37, 24)
    mask = torch.rand(2, 37) > 0.3
    expected = results(layer, x, attention_mask=mask)
    assert_same_bits(replayed(layer, x, attention_mask=mask), expected)


@pytest.mark.parametrize("given", ["stats", "varlen", "offset"])
def test_calls_with_more_than_x_are_not_replayed(given: str) -> None:
    layer, x = new_layer(torch.float32), torch.randn(1, 37, 24)
    options: dict[str, Any] = {
        "stats": {"return_stats": True},
        "varlen": {"cu_seqlens": torch.tensor([0, 20, 37], dtype=torch.int32)},
        "offset": {"position_offset": 3},
    }
    with torch.no_grad():
        for _ in range(CALLS_BEFORE + 2):
            layer(x, **options[given])
    assert not captures(layer)


def test_threads_take_turns() -> None:
    layer, inputs = new_layer(torch.float32), torch.randn(4, 1, 37, 24).unbind()
    expected = [results(layer, x) for x in inputs]
    replayed(layer, inputs[0])
    wrong: list[int] = []

    def work(i: int) -> None:
        x = inputs[i].clone().requires_grad_()
        for _ in range(10):
            if not torch.equal(layer(x).detach(), expected[i]["y"]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def attention_inputs() -> list[Tensor]:
    torch.manual_seed(2)
    sizes = {"q": (37, 4, 8), "k_cmp": (8, 2, 8), "v_cmp": (8, 2, 6), "gates": (37, 4, 3)}
    both = [(37, 2, 8), (37, 2, 6)] * 2
    shapes = [sizes["q"], sizes["k_cmp"], sizes["v_cmp"], *both, sizes["gates"]]
    return [torch.rand(2, *shape).requires_grad_() for shape in shapes]


ATTENTION_SIZES: dict[str, Any] = {
    "block": 8,
    "stride": 4,
    "select_block": 8,
    "n_select": 3,
    "n_init": 1,
    "n_local": 1,
    "window": 9,
}


def attend(inputs: list[Tensor]) -> list[Tensor]:
    o, indices = ops.attention(*inputs, **ATTENTION_SIZES)
    if not o.requires_grad:
        return [o, indices]
    return [o.detach(), indices, *torch.autograd.grad(o, inputs, o.detach().cos())]


@pytest.mark.parametrize("attention", [True, False])
def test_a_gradient_may_change_while_another_is_saved(attention: bool) -> None:
    layer, x, inputs = new_layer(torch.float32), torch.randn(1, 37, 24), attention_inputs()
    for _ in range(CALLS_BEFORE + 2):
        y = ops.attention(*inputs, **ATTENTION_SIZES)[0] if attention else differentiated(layer, x)
        first, second, *_ = torch.autograd.grad(y.sum(), inputs if attention else list(layer.parameters()))
        penalty = (first * torch.ones_like(first, requires_grad=True)).sum()
        second.mul_(2)
        penalty.backward()


@pytest.mark.parametrize("grad", [True, False])
def test_attention_is_replayed_to_the_bit(grad: bool) -> None:
    inputs = attention_inputs()
    router().captures = Captures()
    with torch.set_grad_enabled(grad):
        found = [attend(inputs) for _ in range(CALLS_BEFORE + 3)]
        (graph,) = router().captures.shapes.values()
        assert isinstance(graph, AttentionReplay)
        for other in found[1:]:
            assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))
        other = [x.detach().flip(1).requires_grad_() for x in inputs]
        replayed_now = attend(other)
        router().captures = Captures()
        assert all(torch.equal(x, y) for x, y in zip(attend(other), replayed_now, strict=True))


def test_second_derivatives_of_attention_raise() -> None:
    inputs = attention_inputs()
    for _ in range(CALLS_BEFORE + 2):
        attend(inputs)
    o, _ = ops.attention(*inputs, **ATTENTION_SIZES)
    (dq,) = torch.autograd.grad(o.sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(dq.sum(), inputs[1:2])


def differentiated(layer: NSAAttention, x: Tensor) -> Tensor:
    return layer(x.clone().requires_grad_())


@pytest.mark.parametrize("change", ["config", "rope", "gate"])
def test_a_layer_that_is_changed_is_captured_again(change: str) -> None:
    layer, x = new_layer(torch.float32), torch.randn(1, 37, 24)
    before = replayed(layer, x)
    if change == "config":
        layer.config = replace(layer.config, w=3)
    elif change == "gate":
        layer.gate.config = replace(layer.config, gate="softmax")
    else:
        layer.rope = Rope(8, 123.0)
    n_replays = router().counts.calls["graph", "replay"]
    found = results(layer, x)
    assert router().counts.calls["graph", "replay"] == n_replays
    layer.captures = Captures()
    assert_same_bits(found, results(layer, x))
    assert not torch.equal(found["y"], before["y"])


def test_a_config_may_be_replaced_before_the_backward_pass() -> None:
    layer, x = new_layer(torch.float32), torch.randn(1, 37, 24)
    expected = replayed(layer, x)["x"]
    for first in (True, False):
        leaf = x.clone().requires_grad_()
        y, config = layer(leaf), layer.config
        if first:
            # As if no backward pass had been captured yet.
            captures(layer)[0].backward = None
        layer.config = replace(config, w=3)
        torch.manual_seed(1)
        (dx,) = torch.autograd.grad(y, [leaf], torch.randn_like(y))
        layer.config = config
        assert torch.equal(dx, expected)


def test_transposed_weights_are_not_replayed() -> None:
    """They lie where they lay; a graph would read them as they were."""
    layer, x = new_layer(torch.float32, dim=32), torch.randn(1, 37, 32)
    replayed(layer, x)
    layer.q_proj.weight.data = layer.q_proj.weight.data.t()
    before = router().counts.calls["graph", "replay"]
    results(layer, x)
    assert router().counts.calls["graph", "replay"] == before


def test_weights_that_are_cut_are_captured_again() -> None:
    """They start where they did, as after pruning."""
    layer, x = new_layer(torch.float32), torch.randn(1, 37, 24)
    replayed(layer, x)
    expected = layer(x.clone().requires_grad_())[..., :12]
    layer.o_proj.weight = torch.nn.Parameter(layer.o_proj.weight.detach()[:12])
    assert torch.equal(differentiated(layer, x), expected)
    assert replayed(layer, x)["y"].shape == (1, 37, 12)
    assert len(captures(layer)) == 2


@pytest.mark.parametrize("name", ["fp32_precision", "allow_fp16_accumulation"])
def test_another_precision_is_captured_again(name: str) -> None:
    layer, x, matmul = new_layer(torch.float32), torch.randn(1, 37, 24), torch.backends.cuda.matmul
    replayed(layer, x)
    kept = getattr(matmul, name)
    changed = not kept if name == "allow_fp16_accumulation" else "ieee" if kept == "tf32" else "tf32"
    setattr(matmul, name, changed)
    try:
        replayed(layer, x)
    finally:
        setattr(matmul, name, kept)
    assert len(captures(layer)) == 2


def test_x_may_change_before_backward_under_autocast() -> None:
    """The passes read it in autocast's dtype, which is a copy."""
    layer, x = new_layer(torch.float32), torch.randn(1, 37, 24)
    found = []
    for _ in range(CALLS_BEFORE + 2):
        leaf = x.clone().requires_grad_()
        hidden = leaf * 1
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(hidden)
        hidden += y
        found.append(torch.autograd.grad(hidden.sum(), [leaf])[0])
    assert captures(layer)
    assert all(torch.equal(dx, found[0]) for dx in found)


def test_autocast_of_the_backward_pass_alone_is_not_ignored() -> None:
    layer, x, dy = new_layer(torch.float32), *torch.randn(2, 1, 37, 24).unbind()
    found = []
    for _ in range(CALLS_BEFORE + 3):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(torch.autograd.grad(y, [leaf], dy)[0])
    assert captures(layer)
    assert all(torch.equal(dx, found[0]) for dx in found)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> None:
        return None


def test_a_gradient_that_does_not_come_stays_none() -> None:
    layer, x = new_layer(torch.float32), torch.randn(1, 37, 24)
    inputs = attention_inputs()
    router().captures = Captures()
    for _ in range(CALLS_BEFORE + 2):
        o, _ = ops.attention(*inputs, **ATTENTION_SIZES)
        (NoGradient.apply(differentiated(layer, x)).sum() + NoGradient.apply(o).sum()).backward()
    assert all(p.grad is None for p in [*layer.parameters(), *inputs])


def test_a_compiler_meets_no_replays() -> None:
    layer, inputs = new_layer(torch.float32), attention_inputs()
    torch._dynamo.reset()
    for compiled in (layer, lambda *given: ops.attention(*given, **ATTENTION_SIZES)[0]):
        given = [torch.randn(1, 37, 24)] if compiled is layer else inputs
        torch.compile(compiled, fullgraph=True, backend="aot_eager")(*given).sum().backward()


def test_a_layer_is_freed_without_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def replay(self) -> None:
            pass

    # As a CUDA graph, it does not hold the function.
    monkeypatch.setattr(replay, "capture_graph", lambda function, pool, stream: Graph())
    layer, x = new_layer(torch.float32), torch.randn(1, 37, 24)
    gc.disable()
    try:
        for _ in range(CALLS_BEFORE + 2):
            differentiated(layer, x).sum().backward()
        assert captures(layer)[0].backward is not None
        last, layer_ref = differentiated(layer, x), ref(layer)
        del layer
        last.sum().backward()
        del last
        assert layer_ref() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("problem", ["memory", "backend", "driver"])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_what_cannot_be_captured_is_launched(way: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not captured: a backend that waits for the device would end the capture, and the run with it."""
    layer, x = new_layer(torch.float32), torch.randn(1, 37, 24)
    expected = results(layer, x)
    inputs = attention_inputs()
    router().captures = Captures()
    wanted = attend(inputs)
    if way == "backward":
        for _ in range(CALLS_BEFORE + 1):
            differentiated(layer, x)
            ops.attention(*inputs, **ATTENTION_SIZES)
        assert captures(layer)

    n_tries = 0

    def fail(function: Callable[[], None], **where: object) -> None:
        nonlocal n_tries
        n_tries += 1
        raise torch.OutOfMemoryError if problem == "memory" else RuntimeError("captured")

    monkeypatch.setattr(replay, "capture_graph", fail)
    if problem == "backend":
        monkeypatch.setattr(replay, "REPLAYABLE", ())
    for _ in range(CALLS_BEFORE + 2):
        assert_same_bits(results(layer, x), expected)
        assert all(torch.equal(a, b) for a, b in zip(attend(inputs), wanted, strict=True))
    assert [one.backward for one in captures(layer)] == ([None] if way == "backward" else [])
    # Memory may be free for the other one, but a capture that failed leaves its pool in the middle of it.
    assert n_tries == {"memory": 2, "backend": 0, "driver": 1}[problem]


def test_captures_are_looked_up_by_many_threads() -> None:
    shared: Captures[object] = Captures()
    done: list[int] = []

    def work(first: int) -> None:
        for i in range(5000):
            shared.find(((i * 7 + first) % 13,), object)
        done.append(first)

    kept = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(kept)
    assert sorted(done) == [0, 1, 2, 3]
    assert len(shared.shapes) == MAX_SHAPES


def test_a_graph_counts_no_calls_of_other_threads() -> None:
    layer, other = new_layer(torch.float32), new_layer(backend="reference")
    x, done = torch.randn(1, 37, 24), threading.Event()

    def work() -> None:
        with torch.no_grad():
            while not done.is_set():
                other(x.double())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with torch.no_grad():
            for _ in range(CALLS_BEFORE + 1):
                layer(x)
    finally:
        done.set()
        thread.join()
    (graph,) = captures(layer)
    assert {backend for _, backend in graph.forward.calls} == {"sdpa", "replay"}
    assert set(graph.forward.calls.values()) <= {1, 2}


@pytest.mark.parametrize("off", ["setting", "allocator"])
def test_replays_are_off(off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if off == "setting":
        monkeypatch.setattr(settings, "current", lambda: settings.Settings.load(environ={"NSA_REPLAY": "0"}))
    else:
        monkeypatch.setattr(replay, "has_pools", lambda: False)
    layer, x = new_layer(torch.float32), torch.randn(1, 37, 24)
    with torch.no_grad():
        for _ in range(CALLS_BEFORE + 2):
            layer(x)
    assert not layer.captures.shapes
