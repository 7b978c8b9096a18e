"""The decode kernels against the reference in fp64: attention over given stores, then whole steps of a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from interpreted import DEVICE, INTERPRETED
from torch import Tensor

from nsa import NSAAttention, NSAConfig, decoding, reference
from nsa.backends import routing
from nsa.backends import triton as triton_backend
from nsa.backends.routing import BackendFailure
from nsa.backends.triton.decode import DecodeTile, Hyperparameters, decode_attention
from nsa.backends.triton.launch import Launch
from nsa.decoding import fused_step
from nsa.geometry import n_compressed
from nsa.rope import Rope

# Small tiles and splits, so that short caches have several of each.
SMALL = DecodeTile(tile_bytes=1024, split=32, window_split=8, selected_splits=2)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


@dataclass(frozen=True)
class StepCase:
    lengths: tuple[int, ...]  # of each row before the step
    tokens: int = 1
    heads: int = 4
    groups: int = 2
    d_k: int = 16
    d_v: int = 16
    max_len: int = 96
    block: int = 8
    stride: int = 4
    select_block: int = 16
    n_select: int = 4
    n_init: int = 1
    n_local: int = 2
    window: int = 20
    rollback: int = 8
    dtype: torch.dtype = torch.float32
    tile: DecodeTile = SMALL

    @property
    def how(self) -> Hyperparameters:
        selection = (self.select_block, self.n_select, self.n_init, self.n_local)
        return Hyperparameters(self.block, self.stride, *selection, self.window, self.d_k**-0.5, self.max_len)


class StepInputs:
    """Random stores; what no token of the step may read is NaN."""

    def __init__(self, case: StepCase, *, n_distinct: int | None = None) -> None:
        self.case, batch = case, len(case.lengths)
        self.generator = torch.Generator().manual_seed(0)
        self.q = self.normal(batch, case.tokens, case.heads, case.d_k)
        self.gates = torch.rand(batch, case.tokens, case.heads, 3, generator=self.generator).to(case.dtype)
        self.start = torch.tensor(case.lengths, dtype=torch.int32)
        n_blocks = n_compressed(case.max_len, case.block, case.stride)
        self.compressed, self.selected, by_position = (self.store(n) for n in (n_blocks, case.max_len, case.max_len))
        if n_distinct is not None:
            keys = self.compressed[0]
            keys.copy_(keys[:, torch.arange(keys.shape[1]) % n_distinct])
        self.by_position = by_position
        places = min(case.window + case.rollback, case.max_len)
        self.window = tuple(torch.full_like(x[:, : places + 1], torch.nan) for x in by_position)
        for b, length in enumerate(case.lengths):
            end = min(length + case.tokens, case.max_len)
            for ring, x in zip(self.window, by_position, strict=True):
                for position in range(max(0, end - places), end):
                    ring[b, position % places] = x[b, position]
            for store, n in ((self.selected, end), (self.compressed, n_compressed(end, case.block, case.stride))):
                for x in store:
                    x[b, n:] = torch.nan

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.case.dtype)

    def store(self, places: int) -> tuple[Tensor, Tensor]:
        batch, groups = len(self.case.lengths), self.case.groups
        return (
            self.normal(batch, places + 1, groups, self.case.d_k),
            self.normal(batch, places + 1, groups, self.case.d_v),
        )

    def run(self, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Of some of the rows."""
        c = self.case
        stores = [tuple(x[rows].to(DEVICE) for x in pair) for pair in (self.compressed, self.selected, self.window)]
        q, gates, start = (x[rows].to(DEVICE) for x in (self.q, self.gates, self.start))
        o, indices = decode_attention(q, *stores, gates, start, c.how, c.tile)
        return o.cpu(), indices.cpu()

    def expected(self) -> tuple[Tensor, Tensor]:
        c = self.case

        def wide(pair: tuple[Tensor, ...]) -> list[Tensor]:
            return [x[:, :-1].double().nan_to_num(0.0) for x in pair]

        q, start = self.q.double(), self.start
        (k_cmp, v_cmp), compression = wide(self.compressed), {"block": c.block, "stride": c.stride, "q_start": start}
        o_cmp, lse = reference.compressed_attention(q, k_cmp, v_cmp, **compression)
        names = ("select_block", "n_select", "n_init", "n_local")
        selection = {name: getattr(c, name) for name in names}
        indices = reference.select_blocks(q, k_cmp, lse, **compression, **selection)
        size = c.select_block
        o_sel, _ = reference.selected_attention(q, *wide(self.selected), indices, select_block=size, q_start=start)
        o_win, _ = reference.sliding_attention(q, *wide(self.by_position), window=c.window, q_start=start)
        gates = self.gates.double()
        return gates[..., :1] * o_cmp + gates[..., 1:2] * o_sel + gates[..., 2:] * o_win, indices


CASES = {
    "one token": StepCase(lengths=(37, 0, 95)),
    "an empty row": StepCase(lengths=(0,), tokens=3),
    "borders of blocks": StepCase(lengths=(7, 12, 64)),
    "borders of the window": StepCase(lengths=(19, 20, 28), tokens=2),
    "three heads per group": StepCase(lengths=(90,), tokens=4, heads=6),
    "one head per group": StepCase(lengths=(37, 90), tokens=2, heads=2),
    "sixteen heads per group": StepCase(lengths=(70,), tokens=2, heads=16, groups=1),
    "more rows than a tile": StepCase(lengths=(70,), tokens=5, heads=13, groups=1),
    "values wider than keys": StepCase(lengths=(37, 90), tokens=2, d_v=48),
    "keys wider than values": StepCase(lengths=(37,), d_k=64, d_v=16),
    "no forced blocks": StepCase(lengths=(90, 40), n_init=0, n_local=0, select_block=8),
    "only forced blocks": StepCase(lengths=(90, 40), n_init=2, n_local=2, select_block=8),
    "three strides per selection block": StepCase(lengths=(90, 55), tokens=3, select_block=12),
    # Into the next tile too, which decides some of the selection.
    "blocks that reach far": StepCase(lengths=(90, 79), tokens=4, block=24, select_block=8, n_select=6),
    "blocks that do not overlap": StepCase(lengths=(90, 55), block=4),
    "a cache shorter than a block": StepCase(lengths=(9, 3), max_len=12, block=16, stride=16),
    "a cache shorter than the window": StepCase(lengths=(9, 3), max_len=14, tokens=2),
    "a selection block longer than a tile": StepCase(lengths=(90, 40), select_block=32, n_select=2, n_local=1),
    "default tiles": StepCase(
        lengths=(290,),
        max_len=300,
        tokens=2,
        d_k=64,
        d_v=64,
        block=32,
        stride=16,
        select_block=64,
        n_select=3,
        n_local=1,
        window=64,
        tile=DecodeTile(),
    ),
    "tokens that share some blocks": StepCase(lengths=(158, 90), tokens=6, heads=2, max_len=192, select_block=8),
    "fp16": StepCase(lengths=(37, 90), tokens=2, dtype=torch.float16),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_attends_as_the_reference_does(name: str) -> None:
    inputs = StepInputs(CASES[name])
    o, indices = inputs.run()
    expected, expected_indices = inputs.expected()
    assert torch.equal(indices, expected_indices)
    tolerance = TOLERANCE[inputs.case.dtype]
    torch.testing.assert_close(o.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("block", [4, 8])
@pytest.mark.parametrize("n_distinct", [1, 4])
def test_lowest_of_equal_blocks_is_selected_across_splits(n_distinct: int, block: int) -> None:
    inputs = StepInputs(StepCase(lengths=(95, 61), select_block=8, block=block), n_distinct=n_distinct)
    # Large scores: a probability relative to another maximum would be rounded otherwise.
    inputs.q *= 7.3
    _, indices = inputs.run()
    assert torch.equal(indices, inputs.expected()[1])


def test_a_row_does_not_depend_on_the_others() -> None:
    inputs = StepInputs(StepCase(lengths=(37, 0, 90)))
    o, indices = inputs.run()
    for b in range(3):
        alone = inputs.run(slice(b, b + 1))
        assert torch.equal(alone[0], o[b : b + 1])
        assert torch.equal(alone[1], indices[b : b + 1])


def test_every_output_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = StepInputs(StepCase(lengths=(37, 0, 94), tokens=2))
    plain = inputs.run()
    empty = torch.empty

    def poisoned(*args: Any, **options: Any) -> Tensor:
        made = empty(*args, **options)
        return made.fill_(torch.nan if made.is_floating_point() else -77)

    monkeypatch.setattr(torch, "empty", poisoned)
    for actual, expected in zip(inputs.run(), plain, strict=True):
        assert torch.equal(actual, expected)


def test_tokens_past_the_end_are_finite_and_do_not_affect_others() -> None:
    inputs = StepInputs(StepCase(lengths=(94, 30), tokens=4))
    o, _ = inputs.run()
    assert o.isfinite().all()
    # The first two tokens of the first row fit.
    inputs.q, inputs.gates = inputs.q[:, :2], inputs.gates[:, :2]
    torch.testing.assert_close(o[:, :2].double(), inputs.expected()[0], atol=1e-5, rtol=1e-5)


LAYER = {
    "dim": 24,
    "n_heads": 4,
    "n_kv_groups": 2,
    "d_k": 16,
    "d_v": 16,
    "l": 8,
    "d": 4,
    "l_sel": 8,
    "n_sel": 4,
    "w": 12,
}


def layers(dtype: torch.dtype = torch.float32, **changed: Any) -> tuple[NSAAttention, NSAAttention]:
    """A layer that steps through the kernels, and the reference in fp64 with the same weights."""
    fused = NSAAttention(NSAConfig(**{**LAYER, **changed}, backend="triton")).to(DEVICE, dtype)
    plain = NSAAttention(NSAConfig(**{**LAYER, **changed}, backend="reference")).double()
    plain.load_state_dict(fused.state_dict())
    return fused, plain


def assert_steps_equal_the_whole(
    fused: Any, plain: Any, steps: list[int], *, batch: int = 1, max_len: int | None = None, **options: Any
) -> None:
    """Of NSA or of dense attention; `options` of the cache."""
    length = sum(steps)
    x = torch.randn(batch, length, fused.config.dim, dtype=fused.q_proj.weight.dtype)
    with torch.no_grad():
        whole = plain(x.double())
        cache = fused.new_cache(batch, max_len or length, **options)
        routing.router().counts.clear()
        y = torch.cat([fused(part.to(DEVICE), cache=cache).cpu() for part in x.split(steps, dim=1)], dim=1)
    assert routing.router().counts.calls["decode", "triton"] == len(steps)
    assert cache.lengths.tolist() == [length] * batch
    assert cache.high_water.tolist() == [length] * batch
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(y.double(), whole, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("changed", "steps"),
    [
        pytest.param({}, [8, 5, 1, 2, 1], id="mlp", marks=pytest.mark.slow),
        pytest.param({"phi": "mean", "share_kv": True}, [5, 4, 1, 8], id="mean, shared K/V", marks=pytest.mark.slow),
        pytest.param({"compress_rope": "before", "d_v": 32, "phi_hidden": 20}, [7, 3, 4], id="rotated before"),
        pytest.param({"phi": "mean", "n_heads": 3, "n_kv_groups": 1, "d": 2, "l": 4}, [7, 1, 8], id="short blocks"),
    ],
)
def test_steps_of_a_layer_equal_the_whole_sequence(changed: dict[str, Any], steps: list[int]) -> None:
    assert_steps_equal_the_whole(*layers(**changed), steps)


def test_steps_with_branch_norms_leave_the_decode_kernels_out() -> None:
    fused, plain = layers(branch_norm=True, phi="mean", n_heads=2, n_kv_groups=1)
    x = torch.randn(1, 6, fused.config.dim)
    with torch.no_grad():
        cache = fused.new_cache(1, 6)
        routing.router().counts.clear()
        y = torch.cat([fused(part.to(DEVICE), cache=cache).cpu() for part in x.split([5, 1], dim=1)], dim=1)
    assert routing.router().counts.calls["decode", "triton"] == 0
    torch.testing.assert_close(y.double(), plain(x.double()), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_many_steps_equal_the_whole_sequence() -> None:
    """Past several borders of blocks, windows and rings; single tokens where there is a GPU to take them."""
    fused, plain = layers(phi="mean", n_heads=1, n_kv_groups=1, dim=8, w=40, n_sel=5)
    assert_steps_equal_the_whole(fused, plain, [8] * 12 if INTERPRETED else [1] * 500)


def step_both(fused: Any, plain: Any, lengths: list[int], max_len: int, **options: Any) -> Any:
    """Caches of both layers, filled alike by the plain one to rows of `lengths`."""
    caches = [layer.new_cache(len(lengths), max_len, **options) for layer in (fused, plain)]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    x = torch.randn(len(lengths), max(lengths), fused.config.dim, dtype=torch.float64)
    plain(x, attention_mask=mask, cache=caches[1])
    for mine, other in zip(*(cache.buffers() for cache in caches), strict=True):
        mine.copy_(other)
    caches[0].longest = caches[1].longest
    return caches


def test_ragged_rows_with_padding_step_like_the_general_code() -> None:
    fused, plain = layers()
    mine, other = step_both(fused, plain, [3, 30, 17], 48)
    routing.router().counts.clear()
    for mask in ([[1, 1], [1, 0], [0, 1]], [[0, 0], [1, 1], [1, 0]]):
        kept = torch.tensor(mask, dtype=torch.bool)
        x = torch.randn(3, 2, fused.config.dim)
        with torch.no_grad():
            y = fused(x.to(DEVICE), attention_mask=kept.to(DEVICE), cache=mine).cpu()
            torch.testing.assert_close(
                y.double(), plain(x.double(), attention_mask=kept, cache=other), atol=1e-5, rtol=0
            )
        for a, b in zip(mine.buffers(), other.buffers(), strict=True):
            a, b = (x[:, :-1] if x.dim() > 1 else x for x in (a, b))
            torch.testing.assert_close(a.cpu().double(), b.double(), atol=1e-5, rtol=0)
    assert routing.router().counts.calls["decode", "triton"] == 2


@pytest.mark.parametrize("branch", [None, "win"])
def test_padding_does_not_read_tokens_that_were_removed(branch: str | None) -> None:
    layer = NSAAttention(NSAConfig(**LAYER, force_branch=branch, backend="triton")).to(DEVICE)
    x = torch.randn(2, 20, layer.config.dim, device=DEVICE)
    cache = layer.new_cache(2, 64)
    layer(x, cache=cache)
    layer(torch.full_like(x[:, :2], float("nan")), cache=cache)
    cache.crop(20)
    real = torch.tensor([[True, False, False], [True, True, True]], device=DEVICE)
    y = layer(x[:, :3], attention_mask=real, cache=cache)
    expected = layer(torch.cat([x[0], x[0, :1]])[None])[0, -1]
    torch.testing.assert_close(y[0, 0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("phi", ["mlp", "mean"])
def test_a_position_offset_is_that_of_the_general_code(phi: str) -> None:
    """Of queries, keys and the blocks that the step completes."""
    fused, plain = layers(phi=phi, n_heads=2, n_kv_groups=1)
    mine, other = (layer.new_cache(1, 16) for layer in (fused, plain))
    x = torch.randn(1, 14, fused.config.dim)
    with torch.no_grad():
        plain(x[:, :10].double(), cache=other, position_offset=50)
        for a, b in zip(mine.buffers(), other.buffers(), strict=True):
            a.copy_(b)
        mine.longest = other.longest
        routing.router().counts.clear()
        y = fused(x[:, 10:].to(DEVICE), cache=mine, position_offset=50).cpu()
        expected = plain(x[:, 10:].double(), cache=other, position_offset=50)
    assert routing.router().counts.calls["decode", "triton"] == 1
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=0)
    for a, b in zip(mine.buffers(), other.buffers(), strict=True):
        a, b = (x[:, :-1] if x.dim() > 1 else x for x in (a, b))
        torch.testing.assert_close(a.cpu().double(), b.double(), atol=1e-5, rtol=0)


def test_a_full_static_cache_drops_what_does_not_fit() -> None:
    fused, plain = layers()
    mine, other = step_both(fused, plain, [14, 5], 16, static=True)
    routing.router().counts.clear()
    x = torch.randn(2, 4, fused.config.dim)
    with torch.no_grad():
        y, expected = fused(x.to(DEVICE), cache=mine).cpu(), plain(x.double(), cache=other)
    assert routing.router().counts.calls["decode", "triton"] == 1
    assert mine.lengths.tolist() == [16, 9]
    torch.testing.assert_close(y[0, :2].double(), expected[0, :2], atol=1e-5, rtol=0)
    torch.testing.assert_close(y[1].double(), expected[1], atol=1e-5, rtol=0)
    assert y.isfinite().all()


def test_a_full_cache_refuses_and_is_unchanged() -> None:
    fused, plain = layers()
    mine, _ = step_both(fused, plain, [14, 5], 16)
    before = [x.clone() for x in mine.buffers()]
    with pytest.raises(ValueError, match=r"17; .*max_len = 16"), torch.no_grad():
        fused(torch.randn(2, 3, fused.config.dim, device=DEVICE), cache=mine)
    assert all(torch.equal(a, b) for a, b in zip(before, mine.buffers(), strict=True))


@pytest.mark.parametrize(("n_tokens", "max_rollback"), [(9, 32), (3, 1)])
def test_a_longer_step_or_a_small_ring_is_not_for_the_kernels(n_tokens: int, max_rollback: int) -> None:
    layer = NSAAttention(NSAConfig(**LAYER, backend="triton")).to(DEVICE)
    cache = layer.new_cache(1, 40, max_rollback=max_rollback)
    x = torch.randn(1, n_tokens, layer.config.dim, device=DEVICE)
    assert fused_step(layer, x, cache, None, 0) is None
    assert cache.lengths.tolist() == [0]


def test_a_phi_with_an_adapter_is_not_for_the_kernels() -> None:
    """They read its weights, and would not see what the module adds to them."""

    class Adapted(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    layer = NSAAttention(NSAConfig(**LAYER, backend="triton")).to(DEVICE)
    layer.phi_v.outer = Adapted(layer.phi_v.outer.in_features, layer.phi_v.outer.out_features, device=DEVICE)
    cache = layer.new_cache(1, 40)
    assert fused_step(layer, torch.randn(1, 1, layer.config.dim, device=DEVICE), cache, None, 0) is None
    assert cache.lengths.tolist() == [0]


def test_a_method_of_its_own_is_not_for_the_kernels() -> None:
    class Doubled(NSAAttention):
        def attend(self, *args: Any, **given: Any) -> tuple[Tensor, Tensor]:
            o, indices = super().attend(*args, **given)
            return 2 * o, indices

    layer = Doubled(NSAConfig(**LAYER, backend="triton")).to(DEVICE)
    x, cache = torch.randn(1, 7, layer.config.dim, device=DEVICE), layer.new_cache(1, 40)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, cache=cache), layer(x), rtol=1e-4, atol=1e-4)


def test_another_rope_is_not_for_the_kernels() -> None:
    """They compute angles from the cache's frequencies."""
    layer = NSAAttention(NSAConfig(**LAYER, backend="triton")).to(DEVICE)
    layer.rope = Rope(layer.config.d_k, 123.0)
    x = torch.randn(1, 1, layer.config.dim, device=DEVICE)
    assert fused_step(layer, x, layer.new_cache(1, 40), None, 0) is None


def test_the_kernels_run_only_by_name() -> None:
    layer = NSAAttention(NSAConfig(**LAYER)).to(DEVICE)
    routing.router().counts.clear()
    with torch.no_grad():
        layer(torch.randn(1, 1, layer.config.dim, device=DEVICE), cache=layer.new_cache(1, 40))
    assert routing.router().counts.calls["decode", "triton"] == 0


@pytest.mark.parametrize(
    ("changed", "failure"),
    [({"l_sel": 2048}, None), ({}, BackendFailure("out of shared memory"))],
    ids=["blocks too long for them", "a launch that fails"],
)
def test_auto_goes_on_where_the_decode_kernels_fail(
    changed: dict[str, Any], failure: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where they are `auto`'s; by name or with `strict` there is no other way."""
    asked, step = [], triton_backend.decode_step

    def decode_step(*args: Any, **options: Any) -> Any:
        asked.append(1)
        if failure is not None:
            raise failure
        return step(*args, **options)

    monkeypatch.setattr(routing.router(), "failed", {})
    monkeypatch.setattr(decoding, "kernels_run", lambda problem, backend: True)
    monkeypatch.setattr(triton_backend, "decode_step", decode_step)
    config = NSAConfig(**{**LAYER, **changed}, backend="auto")
    layer, x = NSAAttention(config).to(DEVICE), torch.randn(2, 10, LAYER["dim"], device=DEVICE)
    routing.router().counts.clear()
    with torch.no_grad():
        cache = layer.new_cache(2, 12)
        y = torch.cat([layer(part, cache=cache) for part in x.split([7, 1, 1, 1], dim=1)], dim=1)
        torch.testing.assert_close(y, layer(x), atol=1e-5, rtol=1e-5)
        # A launch that failed is not tried again.
        assert len(asked) == (4 if failure is None else 2)
        assert sum(routing.router().counts.failures.values()) == len(asked)
        for other in (replace(config, strict=True), replace(config, backend="triton")):
            layer = NSAAttention(other).to(DEVICE)
            cache = layer.new_cache(2, 12)
            with pytest.raises(BackendFailure):
                layer(x[:, :1], cache=cache)
            assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("n_sel", [2, 4], ids=["all blocks forced", "free blocks"])
@pytest.mark.parametrize(
    ("branch", "kernels"),
    [
        ("cmp", ["compressed_split_kernel", "merge_kernel"]),
        ("sel", ["compressed_split_kernel", "select_step_kernel", "near_kernel", "merge_kernel"]),
        ("win", ["near_kernel", "merge_kernel"]),
    ],
)
def test_a_pinned_gate_launches_what_its_branch_needs(
    branch: str, kernels: list[str], n_sel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, plain = layers(phi="mean", n_heads=2, n_kv_groups=1, n_init=1, n_local=1, n_sel=n_sel, force_branch=branch)
    launched, call = [], Launch.__call__

    def spy(self: Launch, **given: Any) -> None:
        launched.append(self.kernel.__name__)
        call(self, **given)

    mine, other = step_both(fused, plain, [30, 17], 48)
    x = torch.randn(2, 2, fused.config.dim)
    monkeypatch.setattr(Launch, "__call__", spy)
    with torch.no_grad():
        y, expected = fused(x.to(DEVICE), cache=mine).cpu(), plain(x.double(), cache=other)
        assert launched == ["append_kernel", "mean_kernel", *kernels]
        torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)
        _, stats = fused(x.to(DEVICE), cache=mine, return_stats=True)
        _, whole = plain(x.double(), cache=other, return_stats=True)
    assert torch.equal(stats.indices.cpu(), whole.indices)
