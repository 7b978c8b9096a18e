"""The layer as one autograd node, for eager calls.

Autograd's bookkeeping for a layer (ten matmuls, four activations, a dozen views) costs the host more than the attention
between them. Here the forward pass runs below autograd, and one backward function calls the matmuls itself.

It computes what the modules of `NSAAttention` compute, from their parameters. Where those may be observed or replaced
(hooks, LoRA, quantization, sharded parameters, tensor subclasses, a compiler), the modules are called instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from nsa.dtypes import matmul_dtype
from nsa.functional import hyperparameters_of
from nsa.once import differentiable_once
from nsa.ops.compress import COMPRESS_MEAN, GATHER_BLOCKS
from nsa.ops.fused import run_backward, run_forward
from nsa.ops.registry import PLAIN
from nsa.replay import MAX_LAYER, BothPasses, Results, addresses, can_replay, situation
from nsa.sequences import Pooling, branch_of

if TYPE_CHECKING:
    from nsa.attention import NSAAttention
    from nsa.config import NSAConfig
    from nsa.rope import Rope

LAYER_ONCE = "NSAAttention is differentiable once. For second derivatives, use nsa.reference"
CHILDREN = ("q_proj", "k_proj", "v_proj", "phi_k", "phi_v", "gate", "o_proj")
# Which of the Linears have a bias.
BIASED = {"q_proj": False, "k_proj": False, "v_proj": False, "o_proj": False, "inner": True, "outer": True}
# What the node computes itself, or a replay has captured; a module with one of its own is not to be ignored.
METHODS = {"project", "heads", "projections", "attend", "compress_all", "run_modules", "angles", "block_angles"}
METHODS |= {"split_keys", "split_values", "activate", "activate_backward", "mlp"}
# Up to this many tokens, matmuls with the same input are one matmul of concatenated weights, which copies the weights
# on the GPU and saves the host nine launches. Beyond, the GPU is what takes the time.
FEW_TOKENS = 4096


def is_plain_call(*tensors: Tensor) -> bool:
    """Whether nothing but autograd could tell what is called with these tensors: no compiler, mode, transform or hook
    sees the operations, and no tensor is of a class with operations of its own."""
    if torch.compiler.is_compiling() or not all(type(x) in PLAIN for x in tensors):
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    return not (forward_ad._current_level >= 0 or _has_any_global_hook() or torch._C._is_tracing())


def parameters_of(layer: NSAAttention, x: Tensor) -> list[Tensor] | None:
    """The layer's parameters in the order of `layer.parameters()`, or None if something but autograd could tell this
    path from a call of the layer's modules. A layer that is partly frozen saves less by its modules."""
    c = layer.config
    if c.force_branch is not None or c.branch_norm or not is_plain_call(x):
        return None
    found: list[Tensor] = []
    children: dict[str, nn.Module] = layer.__dict__["_modules"]
    if tuple(children) != CHILDREN or METHODS & layer.__dict__.keys():
        return None
    if not all(collect(name, child, found) for name, child in children.items()):
        return None
    # Linears refuse an input of another dtype, where the node would cast their weights.
    if not matches_config(layer) or len({p.dtype for p in found}) > 1:
        return None
    trained = x.requires_grad and all(p.requires_grad for p in found)
    return found if trained or not torch.is_grad_enabled() else None


def matches_config(layer: NSAAttention) -> bool:
    """Whether `phi` and the gate, which may have been replaced, do what the layer's config says."""
    expected = layer.config.phi, layer.config.l
    if any((phi.kind, phi.block) != expected for phi in (layer.phi_k, layer.phi_v)):
        return False
    return layer.gate.config.force_branch is None


def collect(name: str, module: nn.Module, found: list[Tensor]) -> bool:
    """Add the parameters of `module` to `found`; false where they are not as the layer made them, or with hooks."""
    state = module.__dict__
    if is_observed(module) or METHODS & state.keys():
        return False
    own = {key: p for key, p in state["_parameters"].items() if p is not None}
    if not all(type(p) in PLAIN for p in own.values()):
        return False
    found += own.values()
    if name in BIASED:
        return type(module) is nn.Linear and tuple(own) == ("weight", "bias")[: 1 + BIASED[name]]
    children: dict[str, nn.Module] = state["_modules"]
    ours = type(module).__module__ in ("nsa.attention", "nsa.compression")
    if not ours or tuple(children) not in ((), ("inner", "outer")):
        return False
    if tuple(own) != (("position",) if state.get("kind") == "mlp" else ()):
        return False
    return all(collect(child, below, found) for child, below in children.items())


def is_observed(module: nn.Module) -> bool:
    """Whether a call of the module does more than its class: by hooks of either pass, or another `forward`."""
    forward, backward = (
        (module._forward_hooks, module._forward_pre_hooks),
        (module._backward_hooks, module._backward_pre_hooks),
    )
    return any((*forward, *backward)) or "forward" in module.__dict__


def is_plain_linear(module: nn.Module) -> bool:
    """Whether nothing but `F.linear` of its parameters happens in a call; to be called by compiled code."""
    return type(module) is nn.Linear and not is_observed(module) and type(module.weight) in PLAIN


class Parameters(NamedTuple):
    """One value per parameter of a layer. For an MLP: inner weight and bias, outer weight and bias. A phi that
    averages has none, else its position embedding comes first."""

    q: Any
    k: Any
    v: Any
    phi_k: Sequence[Any]
    phi_v: Sequence[Any]
    gate: Sequence[Any]
    o: Any

    @classmethod
    def split(cls, flat: Sequence[Any]) -> Parameters:
        """Split one list in the order of `NSAAttention.parameters()`."""
        q, k, v, *phis = flat[:-5]
        half = len(phis) // 2
        return cls(q, k, v, phis[:half], phis[half:], flat[-5:-1], flat[-1])


def matmuls(x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """`x @ w.T` for every one of `weights`, from `x [M, K]`."""
    if x.shape[0] > FEW_TOKENS:
        return [torch.mm(x, w.t()) for w in weights]
    return torch.mm(x, torch.cat(list(weights)).t()).split([w.shape[0] for w in weights], dim=1)


def matmuls_backward(
    grads: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], needs_x: bool, needed: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    dx = None
    if x.shape[0] > FEW_TOKENS:
        if needs_x:
            dx = torch.mm(grads[0], weights[0])
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                # Autocast of the backward pass alone casts the operands of mm, but not of addmm_.
                dx.addmm_(grad.to(dx.dtype), weight.to(dx.dtype))
        return dx, [torch.mm(g.t(), x) if need else None for g, need in zip(grads, needed, strict=True)]
    joined = torch.cat(list(grads), dim=1)
    if needs_x:
        dx = torch.mm(joined, torch.cat(list(weights)))
    if not any(needed):
        return dx, [None] * len(weights)
    found = torch.mm(joined.t(), x).split([w.shape[0] for w in weights])
    # No views: changing one in place is no change of the others.
    return dx, [dw.data if need else None for dw, need in zip(found, needed, strict=True)]


def without_biases(p: Parameters) -> list[Tensor | None]:
    """All parameters in their order, None for those that no gradient depends on."""
    mlps = [[w1, None, w2, None] for w1, _, w2, _ in (phi[1:] for phi in (p.phi_k, p.phi_v) if phi)]
    phis = [x for mlp in mlps for x in (None, *mlp)]
    return [p.q, p.k, p.v, *phis, p.gate[0], None, p.gate[2], None, p.o]


def run_mlp(inner: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`outer(silu(inner))`, and what its backward pass needs."""
    hidden = F.silu(inner)
    return torch.addmm(bias, hidden, weight.t()), (inner, hidden)


def mlp_backward(
    dy: Tensor, saved: Sequence[Tensor], weight: Tensor, needed: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradient of `inner`, and those of the inner bias and of the outer weight and bias."""
    inner, hidden = saved
    d_inner = torch.ops.aten.silu_backward(torch.mm(dy, weight), inner)
    biases = [x.sum(0) if need else None for x, need in ((d_inner, needed[1]), (dy, needed[3]))]
    return d_inner, [biases[0], torch.mm(dy.t(), hidden) if needed[2] else None, biases[1]]


class LayerAngles(NamedTuple):
    """RoPE's of queries and keys, and of compressed keys that are rotated, else None."""

    cos: Tensor
    sin: Tensor
    block_cos: Tensor | None
    block_sin: Tensor | None


def pooling_of(layer: NSAAttention, x: Tensor, cu_seqlens: Tensor | None) -> Pooling:
    """One for keys, values and angles, so that they share what follows from `cu_seqlens`."""
    found: Pooling = branch_of(Pooling, x, x.shape[1], cu_seqlens, None, layer.config.l, layer.config.d)
    return found


def angles_of(layer: NSAAttention, x: Tensor, pooling: Pooling, position_offset: int | Tensor) -> LayerAngles:
    cu_seqlens = pooling.sequences.cu_seqlens
    blocks: tuple[Tensor | None, Tensor | None] = (None, None)
    if layer.config.compress_rope == "after":
        if cu_seqlens is None:
            blocks = layer.block_angles(x, None, position_offset)
        else:
            blocks = layer.rope.angles(pooling.starts[1][None] + position_offset, x.dtype)
    return LayerAngles(*layer.angles(x, cu_seqlens, None, position_offset), *blocks)


# What is saved between the parameters and the tensors of the passes: `cu_seqlens`, angles, `x`.
N_KEPT = 6


def made_of(layer: NSAAttention) -> tuple[NSAConfig, Rope, NSAConfig]:
    """The attributes of a layer that the passes read besides its parameters; each may be replaced."""
    return layer.config, layer.rope, layer.gate.config


def as_in_forward(layer: NSAAttention, made: tuple[NSAConfig, Rope, NSAConfig]) -> NSAAttention:
    """`layer` for a backward pass, with what was `made_of` it in the forward pass."""
    if made_of(layer) == made:
        return layer
    layer, gate = copy(layer), copy(layer.gate)
    layer.config, layer.rope, gate.config = made
    layer._modules = {**layer._modules, "gate": gate}
    return layer


def rest_of(layer: NSAAttention) -> tuple[Any, ...]:
    """The last arguments of `nsa::attention`."""
    c = layer.config
    return *hyperparameters_of(c), c.d_k**-0.5, c.backend, c.strict


class LayerNode(torch.autograd.Function):
    """The layer of `x [B, S, dim]`: its output `[B, S, dim]`, the indices of the selected blocks `[B, S, G, n_sel]`,
    and the gates `[B, S, Hq, 3]`, which carry no gradient."""

    @staticmethod
    def forward(
        ctx: Any, layer: NSAAttention, pooling: Pooling, angles: LayerAngles, x: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`ctx` is None where no gradient is wanted."""
        c, lead, p = layer.config, x.shape[:2], Parameters.split(parameters)
        position = (angles.cos, angles.sin)
        q, k, v, inner = matmuls(x.reshape(-1, c.dim), (p.q, p.k, p.v, p.gate[0]))
        q = layer.rope.rotate(q.view(*lead, -1, c.d_k), position)
        k_raw, k_sel, k_win = layer.split_keys(k.view(*lead, -1, c.d_k), position)
        v_raw, v_sel, v_win = layer.split_values(v.view(*lead, -1, c.d_v))
        logits, gate_saved = run_mlp(inner + p.gate[1], *p.gate[2:])
        # A softmax under CUDA's autocast is fp32.
        gates = layer.gate.activate(logits.view(*lead, -1, 3)).to(q.dtype)

        cu_seqlens, where = pooling.sequences.cu_seqlens, (pooling, c.backend, c.strict)
        k_cmp, k_saved = compress(k_raw, p.phi_k, where)
        v_cmp, v_saved = compress(v_raw, p.phi_v, where)
        if angles.block_cos is not None and angles.block_sin is not None:
            k_cmp = layer.rope.rotate(k_cmp, (angles.block_cos, angles.block_sin))

        inputs = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
        o, *outputs = run_forward(*inputs, cu_seqlens, None, None, *rest_of(layer))
        o = o.view(-1, c.n_heads * c.d_v)
        if ctx is not None:
            ctx.layer, ctx.made, ctx.n_parameters = layer, made_of(layer), len(parameters)
            saved = (o, *inputs, *outputs, *gate_saved, *k_saved, *v_saved)
            # Biases, and position embeddings before them, are not needed, but second derivatives depend on them.
            weights = without_biases(p)
            ctx.biases = [b for b, weight in zip(parameters, weights, strict=True) if weight is None]
            ctx.save_for_backward(*weights, cu_seqlens, *angles, x, *saved)
            ctx.mark_non_differentiable(outputs[0], gates)
            ctx.set_materialize_grads(False)
        # No view, so that the output can be modified in place.
        return torch.ops.aten._unsafe_view(torch.mm(o, p.o.t()), (*lead, p.o.shape[0])), outputs[0], gates

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * (4 + ctx.n_parameters)
        saved = ctx.saved_tensors
        n, layer = ctx.n_parameters, as_in_forward(ctx.layer, ctx.made)
        with torch.no_grad():
            p, (cu_seqlens, *angles, x) = Parameters.split(saved[:n]), saved[n : n + N_KEPT]
            rest, needed = saved[n + N_KEPT :], ctx.needs_input_grad[3:]
            grads = layer_backward(layer, dy, x, p, LayerAngles(*angles), cu_seqlens, rest, needed)
        if torch.is_grad_enabled():
            grads = differentiable_once(LAYER_ONCE, grads, (*saved, *ctx.biases, dy))
        return (None, None, None, *grads)


def arguments(
    layer: NSAAttention,
    cu_seqlens: Tensor | None,
    position_offset: int | Tensor,
    x: Tensor,
    parameters: Sequence[Tensor],
) -> tuple[Any, ...]:
    """The arguments of `LayerNode`, in autocast's dtype where that is on."""
    dtype, pooling = matmul_dtype(x), pooling_of(layer, x, cu_seqlens)
    return (
        layer,
        pooling,
        angles_of(layer, x, pooling, position_offset),
        x.to(dtype),
        *(p.to(dtype) for p in parameters),
    )


# The blocks, `backend` and `strict`.
Where = tuple[Pooling, str, bool]


def compress(x: Tensor, phi: Sequence[Tensor], where: Where) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`phi` of the blocks of `x [B, S, G, D]`: `[B, N, G, D]`, and what its backward pass needs."""
    if not phi:
        return COMPRESS_MEAN.compute(x, *where), ()
    position, weight, bias, *outer = phi
    gathered = GATHER_BLOCKS.compute(x, position, *where)
    rows = gathered.view(-1, gathered.shape[3])
    blocks, saved = run_mlp(torch.addmm(bias, rows, weight.t()), *outer)
    return blocks.view(*gathered.shape[:3], blocks.shape[1]), (rows, *saved)


def compress_backward(
    d_blocks: Tensor, phi: Sequence[Tensor], saved: Sequence[Tensor], where: Where, needed: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradients of `x` and of `phi`."""
    if not phi:
        return COMPRESS_MEAN.differentiate(d_blocks, *where), []
    rows, *saved = saved
    dy = d_blocks.view(-1, d_blocks.shape[3])
    d_inner, d_mlp = mlp_backward(dy, saved, phi[3], needed[1:])
    d_rows = torch.mm(d_inner, phi[1]).view(*d_blocks.shape[:3], rows.shape[1])
    dx, d_position = GATHER_BLOCKS.differentiate(d_rows, *where)
    return dx, [d_position, torch.mm(d_inner.t(), rows) if needed[1] else None, *d_mlp]


def layer_backward(
    layer: NSAAttention,
    dy: Tensor,
    x: Tensor,
    p: Parameters,
    angles: LayerAngles,
    cu_seqlens: Tensor | None,
    saved: Sequence[Tensor],
    needs_input_grad: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of `x` and of the parameters; None where they are not needed.

    `saved`: the flat output of the attention, its inputs and outputs, then what the MLPs need.
    """
    c, rope = layer.config, layer.rope
    position = (angles.cos, angles.sin)
    o, attention, gate_saved, phis = saved[0], saved[1:16], saved[16:18], saved[18:]
    needs_x, needed = needs_input_grad[0], Parameters.split(needs_input_grad[1:])
    shape = x.shape
    batch, length, dim = shape
    x, dy = x.reshape(-1, dim), dy.reshape(-1, dy.shape[2])

    d_o = torch.mm(dy.t(), o) if needed.o else None
    do = torch.mm(dy, p.o).view(batch, length, c.n_heads, c.d_v)
    found = run_backward(do, *attention, cu_seqlens, None, None, *rest_of(layer))
    dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, d_gates = found
    d_logits = layer.gate.activate_backward(d_gates, attention[7]).view(-1, 3 * c.n_heads)
    d_inner, d_gate = mlp_backward(d_logits, gate_saved, p.gate[2], needed.gate)

    if angles.block_cos is not None and angles.block_sin is not None:
        dk_cmp = rope.rotate_back(dk_cmp, (angles.block_cos, angles.block_sin))
    where = (pooling_of(layer, do, cu_seqlens), c.backend, c.strict)
    dk_raw, d_phi_k = compress_backward(dk_cmp, p.phi_k, phis[:3], where, needed.phi_k)
    dv_raw, d_phi_v = compress_backward(dv_cmp, p.phi_v, phis[3:], where, needed.phi_v)
    dq = rope.rotate_back(dq, position)
    dk = layer.split_keys_backward(dk_raw, dk_sel, dk_win, position)
    dv = layer.split_values_backward(dv_raw, dv_sel, dv_win)
    grads = [*(g.reshape(x.shape[0], -1) for g in (dq, dk, dv)), d_inner]
    dx, (d_q, d_k, d_v, d_gate_inner) = matmuls_backward(
        grads, x, (p.q, p.k, p.v, p.gate[0]), needs_x, (needed.q, needed.k, needed.v, needed.gate[0])
    )
    dx = None if dx is None else dx.view(shape)
    return (dx, d_q, d_k, d_v, *d_phi_k, *d_phi_v, d_gate_inner, *d_gate, d_o)


class Kept:
    """A stand-in for autograd's context, which holds what a forward pass saves."""

    tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def mark_non_differentiable(self, *_: Tensor) -> None:
        pass

    def set_materialize_grads(self, _: bool) -> None:
        pass


class LayerReplay(BothPasses):
    """The passes of one layer for `x` of one shape, as graphs. They read the parameters where they lie.

    It does not hold the layer, which holds it: memory on a device should not wait for the garbage collector.
    """

    def __init__(self, layer: NSAAttention, x: Tensor, parameters: Sequence[Tensor], differentiable: bool) -> None:
        pooling = pooling_of(layer, x, None)
        angles, self.dtype = angles_of(layer, x, pooling, 0), x.dtype
        # What `replay_layer` knows it by, and has to stay.
        self.made = made_of(layer)
        self.angles = angles
        self.addresses = addresses(without_biases(Parameters.split(parameters)))
        self.n_parameters, self.parameter_dtype = len(parameters), parameters[0].dtype

        def run(x: Tensor) -> Results:
            kept, cast = Kept(), [p.detach().to(x.dtype) for p in parameters]
            y, *_ = LayerNode.forward(kept, layer, pooling, angles, x, *cast)
            return (y, kept.tensors[len(cast) + N_KEPT :]) if differentiable else (y,)

        super().__init__(run, [x])

    def run_backward(
        self, layer: NSAAttention, weights: Sequence[Tensor | None], dy: Tensor, x: Tensor, saved: Tensor
    ) -> Results:
        pack = self.forward.packs[1]
        assert pack is not None
        p = Parameters.split([w if w is None else w.detach().to(self.dtype) for w in weights])
        needed = [True] * (1 + self.n_parameters)
        dx, *grads = layer_backward(layer, dy, x, p, self.angles, None, pack.tensors(saved), needed)
        assert dx is not None
        return dx, [g.to(self.parameter_dtype) for g in grads if g is not None]

    def replay_backward(
        self, layer: NSAAttention, dy: Tensor, x: Tensor, saved: Tensor, weights: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        run, backward = partial(self.run_backward, layer, weights), None
        # They may have been moved since the forward pass, and autocast switched on.
        if addresses(weights) == self.addresses and matmul_dtype(dy) == self.dtype:
            backward = self.find_backward(run, [dy, x, saved])
        if backward is None:
            dx, grads = run(dy, x, saved)
            return dx, *grads
        dx, block = backward(dy, x, saved)
        pack = backward.packs[1]
        assert pack is not None
        return dx, *pack.tensors(block)


class ReplayNode(torch.autograd.Function):
    """The layer of `x [B, S, dim]`: its output `[B, S, dim]`."""

    @staticmethod
    def forward(ctx: Any, layer: NSAAttention, replay: LayerReplay, x: Tensor, *parameters: Tensor) -> Tensor:
        y, saved = replay.forward(x)
        ctx.layer, ctx.replay, ctx.parameters = layer, replay, parameters
        ctx.save_for_backward(x, saved, *without_biases(Parameters.split(parameters)))
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * (3 + ctx.replay.n_parameters)
        x, saved, *weights = ctx.saved_tensors
        layer = as_in_forward(ctx.layer, ctx.replay.made)
        with torch.no_grad():
            grads: tuple[Tensor | None, ...] = ctx.replay.replay_backward(layer, dy, x, saved, weights)
        if torch.is_grad_enabled():
            grads = differentiable_once(LAYER_ONCE, grads, (x, *ctx.parameters, dy))
        return (None, None, *grads)


def replay_layer(layer: NSAAttention, x: Tensor, parameters: Sequence[Tensor]) -> Tensor | None:
    """The layer's output `[B, S, dim]` for fixed-length sequences; None where this call is not to be replayed."""
    c, dtype, differentiable = layer.config, parameters[0].dtype, torch.is_grad_enabled()
    if not can_replay(x, MAX_LAYER, c.backend, c.strict) or not all(p.is_contiguous() for p in parameters):
        return None
    key = (x.shape, *situation(x), dtype, *map(id, made_of(layer)), *addresses(parameters))
    found = layer.captures.find(key, lambda: LayerReplay(layer, x.to(matmul_dtype(x)), parameters, differentiable))
    if found is None:
        return None
    # Cast here, not in the graph: the caller may modify `x` before the backward pass.
    x = x.to(found.dtype)
    y: Tensor = ReplayNode.apply(layer, found, x, *parameters) if differentiable else found.forward(x)[0]
    return y
