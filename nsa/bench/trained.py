"""Attention on the tensors of a trained model, whose neighboring queries select mostly the same blocks, and on noise.

nsa bench trained --run runs/125m --lengths 2048 32768
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nsa.attention import NSAAttention
from nsa.bench import gate
from nsa.bench.attention import AttentionShape, clock
from nsa.bench.runner import Runner, Suite, Task, forward_and_backward
from nsa.config import NSAConfig, require
from nsa.functional import nsa_attention
from nsa.model import LM, load_model
from nsa.train.run_info import config_of, open_data


def middle_layer(model: LM) -> NSAAttention:
    """The middle one of the model's NSA layers; a ValueError if it has none."""
    layers = [layer.attention for layer in model.blocks if isinstance(layer.attention, NSAAttention)]
    require(bool(layers), "--run", "a model without NSA", "one that was trained with --attention nsa")
    return layers[len(layers) // 2]


@torch.no_grad()
def inputs_of_layer(
    model: LM, layer: NSAAttention, tokens: Tensor, dtype: torch.dtype
) -> tuple[tuple[Tensor, ...], float]:
    """The tensors that `layer` gives `nsa_attention` when `model` reads `tokens [B, S]`, and the `shared_selection`."""
    inputs: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.autocast(tokens.device.type, dtype):
        model(tokens, tokens)
        hook.remove()
        (x,) = inputs
        q, raw, selected, window = layer.project(x, layer.angles(x, None, None, 0))
        gates = layer.gate(x)
        compressed = layer.compress_all(raw, None, 0)
        _, stats = layer(x, return_stats=True)
    tensors = (q, *compressed, *selected, *window, gates)
    return tuple(x.to(dtype) for x in tensors), shared_selection(stats.indices)


def shared_selection(indices: Tensor) -> float:
    """The share of selected blocks that the query before selected too; `indices [B, S, G, n]`, -1 for none."""
    own, before = indices[:, 1:, ..., None], indices[:, :-1, :, None]
    selected = own >= 0
    return float(((own == before) & selected).sum() / selected.sum().clamp_min(1))


def tasks(args: argparse.Namespace, runner: Runner) -> Iterator[Task]:
    """The attention of one layer on the run's own data, and on random tensors of the same shapes."""
    require(torch.cuda.is_available(), "nsa bench trained", "started without a GPU", "a machine with a CUDA GPU")
    config, batch = config_of(args.run), args.batch_size
    model = load_model(args.run, "cuda")
    layer = middle_layer(model)
    c = layer.config
    for length in args.lengths:
        shape = AttentionShape(batch, length, c.n_heads, c.n_kv_groups, c.d_k)
        with open_data(config, "train", batch_size=batch, seq_len=length) as loader:
            tokens = next(loader).tokens.view(batch, length).to("cuda")
        trained, shared = inputs_of_layer(model, layer, tokens, runner.dtype)
        print(f"S={length}: neighboring queries share {shared:.0%} of their selected blocks", flush=True)
        noise = (*(torch.randn_like(x) for x in trained[:-1]), torch.rand_like(trained[-1]))
        for op, tensors in (("trained", trained), ("random", noise)):
            leaves = tuple(x.contiguous().requires_grad_() for x in tensors)
            for impl in args.impl:
                own = replace(c, backend=impl.removeprefix("nsa-"))
                forward = partial(nsa_attention, *leaves, config=own)
                error = partial(layer_error, forward, leaves, own)
                yield Task("trained", op, impl, shape, partial(forward_and_backward, forward, leaves), error)


def layer_error(forward: Callable[[], Tensor], leaves: tuple[Tensor, ...], config: NSAConfig) -> float:
    """The error of `nsa_attention` on `leaves`, in units of the tolerance."""
    indices = gate.selected_indices(config, *(x.detach() for x in leaves[:3]))
    return gate.sampled_error(forward, leaves, partial(gate.expect_nsa, config, indices))


run = Suite(tasks, clock).run
