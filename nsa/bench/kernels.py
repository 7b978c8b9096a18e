"""The kernels that can be tuned: their candidate tiles at a shape, and how to run one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa.backends import triton as backend
from nsa.backends.triton import combine, selected, selection, tiles, tuning
from nsa.backends.triton.selected import SelectedBackwardTile, SelectedForwardTile
from nsa.backends.triton.tile_types import TILE_TYPES
from nsa.backends.triton.tuning import GpuFamily, Tuned
from nsa.bench.attention import AttentionShape, Inputs
from nsa.functional import hyperparameter_kwargs, hyperparameters_of
from nsa.sequences import Pooling, Saved, Sequences, Upstream, attention_branches, hyperparameters

TUNED_DTYPE = torch.bfloat16
# Candidate numbers of waves that the key-major kernel splits its work into.
WAVES = (2, 4, 8, 16)


def is_used(kernel: str, shape: AttentionShape) -> bool:
    """Whether the kernel runs at this shape: one of the two score kernels does not."""
    few = shape.n_heads // shape.n_groups <= selection.FEW_HEADS
    return {"scores": not few, "scores-few-heads": few}.get(kernel, True)


def tile_in_use(kernel: str, shape: AttentionShape, gpu: GpuFamily, tuned: Tuned) -> Any:
    """The tile that the kernel runs with now."""
    head_dim = tuning.head_dim_class(shape.head_dim, shape.head_dim)
    return tuned.tile(kernel, TILE_TYPES[kernel], gpu, head_dim, tuning.dtype_class(TUNED_DTYPE))


def tiles_to_measure(kernel: str, shape: AttentionShape, gpu: GpuFamily, tuned: Tuned) -> list[Any]:
    """The tile in use, then the other candidates, each once."""
    current = tile_in_use(kernel, shape, gpu, tuned)
    return list(dict.fromkeys([current, *kernel_candidates(kernel, shape, gpu, current)]))


def kernel_candidates(kernel: str, shape: AttentionShape, gpu: GpuFamily, current: Any) -> list[Any]:
    branch, _, part = kernel.partition("-")
    if branch in ("compressed", "sliding"):
        head_dim = tuning.head_dim_class(shape.head_dim, shape.head_dim)
        cuts: tuple[Any, ...] = tiles.candidates(part, head_dim, large=tuning.is_large(gpu))
        if part != "dkv":
            return list(cuts)
        split = [replace(cut, waves=current.waves, min_row_tiles=current.min_row_tiles) for cut in cuts]
        return [*split, *(replace(current, waves=n) for n in WAVES)]
    if branch == "scores":
        return list(selection.candidates())
    if branch == "combine":
        return list(combine.candidates())
    if part == "backward":
        return [tile for tile in selected.candidates() if isinstance(tile, SelectedBackwardTile)]
    method = part.removeprefix("forward-")
    return [tile for tile in selected.candidates() if isinstance(tile, SelectedForwardTile) and tile.method == method]


class Workbench:
    """The tensors of one shape, each stage's inputs from the stage before, and the kernels on them."""

    def __init__(
        self, shape: AttentionShape, smooth: float, device: str = "cuda", dtype: torch.dtype = TUNED_DTYPE
    ) -> None:
        config = shape.config("triton")
        scale = shape.head_dim**-0.5
        inputs = Inputs.of(shape, dtype, device, smooth)
        self.q, self.k, self.v, self.gates = (x.detach() for x in (inputs.q, inputs.k, inputs.v, inputs.gates))
        sequences = Sequences(shape.batch, shape.length, self.q.device)
        branches = attention_branches(self.q, None, None, None, *hyperparameters_of(config), scale)
        self.over_blocks, self.selection, self.over_selected, self.over_window = branches
        pooling = Pooling(sequences, **hyperparameter_kwargs(config, hyperparameters(Pooling)))
        self.k_cmp, self.v_cmp = (backend.compress_mean_forward(x, pooling) for x in (self.k, self.v))
        self.compressed = backend.compressed_forward(self.q, self.k_cmp, self.v_cmp, self.over_blocks)
        self.indices = backend.select_blocks(self.q, self.k_cmp, self.compressed[1], self.selection)
        self.selected = backend.selected_forward(self.q, self.k, self.v, self.indices, self.over_selected)
        self.slid = backend.sliding_forward(self.q, self.k, self.v, self.over_window)
        self.do = torch.randn_like(self.q)

    def run(self, kernel: str, tile: Any) -> tuple[Tensor, ...]:
        """The outputs of a kernel's launcher with this tile; where it launches two kernels, the other keeps its own."""
        q, k, v, do = self.q, self.k, self.v, self.do
        upstream = Upstream(do)
        branches = (self.compressed[0], self.selected[0], self.slid[0], self.gates)
        match kernel:
            case "compressed-forward":
                return backend.compressed_forward(q, self.k_cmp, self.v_cmp, self.over_blocks, tile=tile)
            case "compressed-dq" | "compressed-dkv":
                both = self.backward_tile(kernel, tile, sliding=False)
                saved = Saved(q, self.k_cmp, self.v_cmp, *self.compressed)
                return backend.compressed_backward(upstream, saved, self.over_blocks, tile=both)
            case "sliding-forward":
                return backend.sliding_forward(q, k, v, self.over_window, tile=tile)
            case "sliding-dq" | "sliding-dkv":
                both = self.backward_tile(kernel, tile, sliding=True)
                return backend.sliding_backward(upstream, Saved(q, k, v, *self.slid), self.over_window, tile=both)
            case "scores" | "scores-few-heads":
                return (backend.select_blocks(q, self.k_cmp, self.compressed[1], self.selection, tile=tile),)
            case "selected-forward-query" | "selected-forward-block":
                return backend.selected_forward(q, k, v, self.indices, self.over_selected, tile=tile)
            case "selected-backward":
                o, lse = self.selected
                saved = Saved(q, k, v, o, lse, self.indices)
                return backend.selected_backward(upstream, saved, self.over_selected, tile=tile)
            case "combine-forward":
                return (backend.combine_forward(*branches, tile=tile),)
            case "combine-backward":
                return backend.combine_backward(do, *branches, tile=tile)
        raise ValueError(f"kernel is {kernel!r}; accepted: {', '.join(TILE_TYPES)}")

    def select_densely(self) -> tuple[Tensor, ...]:
        """The selected forward that reads every block, with the tile of the compressed forward."""
        return backend.selected_forward(self.q, self.k, self.v, self.indices, self.over_selected, method="dense")

    def backward_tile(self, kernel: str, tile: Any, *, sliding: bool) -> tiles.BackwardTile:
        picked = tiles.pick_backward(self.q, self.v, sliding)
        return replace(picked, **{kernel.rpartition("-")[2]: tile})
