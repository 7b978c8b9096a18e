"""A million tokens: past 2^31 elements per tensor, where a 32-bit offset would wrap round and read another row.

The end of the sequence is compared with the reference in fp64 on what the end sees: the last queries of every branch,
and the gradients of keys that only those queries see.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nsa import reference
from nsa.backends.triton import branches, combine, compress, ranged, selected, selection
from nsa.geometry import n_compressed
from nsa.sequences import (
    Compressed,
    Pooling,
    Saved,
    Selected,
    Selection,
    Sequences,
    Sliding,
    Upstream,
    attention_branches,
)

LENGTH = 1 << 20
HEADS, GROUPS, WIDTH = 64, 4, 128
BLOCK, STRIDE, SELECT_BLOCK, WINDOW = 32, 16, 64, 512
TAIL = SELECT_BLOCK  # queries compared: those of the last selection block
SCALE = WIDTH**-0.5
CUT = {"block": BLOCK, "stride": STRIDE}
SEQUENCES = Sequences(1, LENGTH, torch.device("cuda"))
# Selections in which two blocks are so nearly equal that rounding decides.
NEAR_TIES = 0.02
# bf16 keeps 8 bits: an output or gradient is a mean of many products, each rounded once or twice.
TOLERANCE = 2e-2


@pytest.fixture(scope="module", autouse=True)
def large_gpu() -> None:
    _, total = torch.cuda.mem_get_info()
    if total < 120 << 30:
        pytest.skip("needs 120 GiB of GPU memory")
    assert LENGTH * HEADS * WIDTH > 2**31


def normal(n: int, heads: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(1, n, heads, WIDTH, generator=generator, device="cuda", dtype=torch.bfloat16)


def tail_of(x: Tensor) -> Tensor:
    return x[:, -TAIL:]


def compare(
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch: Compressed | Selected | Sliding,
    visible: Tensor,
    n_private: int,
    *indices: Tensor,
) -> None:
    """`visible [TAIL, G, n]`: which of the last `n` keys each of the last queries sees. The last `n_private` keys are
    seen by no other query."""
    o, lse = forward(q, k, v, *indices, branch)
    do = torch.zeros_like(o)
    tail_of(do).copy_(normal(TAIL, HEADS, seed=9))
    dq, dk, dv = backward(Upstream(do), Saved(q, k, v, o, lse, *indices), branch)

    n = visible.shape[-1]
    heads = HEADS // GROUPS
    for g in range(GROUPS):
        # Of a million keys, those that the last queries see.
        seen = visible[:, g].any(dim=0).nonzero().squeeze(1)
        ours = slice(g * heads, (g + 1) * heads)
        leaves = [x.double().requires_grad_() for x in (tail_of(q)[0, :, ours], k[0, -n:, g][seen], v[0, -n:, g][seen])]
        s = torch.einsum("thd,nd->thn", leaves[0], leaves[1]) * SCALE
        s = s.masked_fill(~visible[:, g][:, None, seen], float("-inf"))
        expected = s.softmax(-1) @ leaves[2]
        gradients = torch.autograd.grad(expected, leaves, tail_of(do)[0, :, ours].double())
        close(tail_of(o)[0, :, ours], expected, "o")
        close(tail_of(lse)[0, :, ours], s.logsumexp(-1), "lse")
        close(tail_of(dq)[0, :, ours], gradients[0], "dq")
        close(dk[0, -n_private:, g], gradients[1][-n_private:], "dk")
        close(dv[0, -n_private:, g], gradients[2][-n_private:], "dv")
    assert not dq[:, :-TAIL].any(), "queries without a gradient got one"


def close(actual: Tensor, expected: Tensor, name: str) -> None:
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE, f"{name} is off by {float(error):.1e}"


def last_queries() -> Tensor:
    return torch.arange(LENGTH - TAIL, LENGTH, device="cuda")


def test_sliding() -> None:
    q, k, v = normal(LENGTH, HEADS, 0), normal(LENGTH, GROUPS, 1), normal(LENGTH, GROUPS, 2)
    key = torch.arange(LENGTH - TAIL - WINDOW, LENGTH, device="cuda")
    t = last_queries()[:, None]
    visible = ((key <= t) & (key > t - WINDOW))[:, None].expand(-1, GROUPS, -1)
    branch = Sliding(SEQUENCES, WINDOW, SCALE)
    compare(ranged.sliding_forward, ranged.sliding_backward, q, k, v, branch, visible, TAIL)


def test_compressed_and_selected() -> None:
    n_keys = n_compressed(LENGTH, BLOCK, STRIDE)
    q, k_cmp, v_cmp = normal(LENGTH, HEADS, 0), normal(n_keys, GROUPS, 1), normal(n_keys, GROUPS, 2)
    complete = torch.arange(n_keys, device="cuda") * STRIDE + BLOCK - 1
    visible = (complete <= last_queries()[:, None])[:, None].expand(-1, GROUPS, -1)
    private = TAIL // STRIDE - BLOCK // STRIDE
    branch = Compressed(SEQUENCES, BLOCK, STRIDE, SCALE)
    compare(ranged.compressed_forward, ranged.compressed_backward, q, k_cmp, v_cmp, branch, visible, private)

    _, lse = ranged.compressed_forward(q, k_cmp, v_cmp, branch)
    hyperparameters = {**CUT, "select_block": SELECT_BLOCK, "n_select": 16, "n_init": 1, "n_local": 2}
    indices = selection.select_blocks(q, k_cmp, lse, Selection(SEQUENCES, **hyperparameters, scale=SCALE))
    own = torch.arange(LENGTH, device="cuda") // SELECT_BLOCK
    assert (indices[0, 15 * SELECT_BLOCK + 1024 :, :, -1] == own[15 * SELECT_BLOCK + 1024 :, None]).all()
    start = torch.tensor([LENGTH - TAIL], dtype=torch.int32, device="cuda")
    # The reference's table of overlaps has a billion numbers, which a GPU fills in a moment.
    with torch.device("cuda"):
        given = tail_of(q).double(), k_cmp.double(), tail_of(lse)
        exact = reference.select_blocks(*given, q_start=start, **hyperparameters)
    differs = (tail_of(indices) != exact).any(dim=-1)
    assert differs.float().mean() <= NEAR_TIES, f"{int(differs.sum())} of the last selections differ"
    del k_cmp, v_cmp, lse, exact

    k, v = normal(LENGTH, GROUPS, 3), normal(LENGTH, GROUPS, 4)
    token = torch.arange(LENGTH, device="cuda")
    selects = (tail_of(indices)[0][..., None] == own).any(dim=2)
    visible = selects & (token <= last_queries()[:, None])[:, None]
    over_selected = Selected(SEQUENCES, SELECT_BLOCK, SCALE)
    compare(selected.selected_forward, selected.selected_backward, q, k, v, over_selected, visible, TAIL, indices)

    # In one kernel, where there is one for both: `None` elsewhere.
    over = attention_branches(q, None, None, None, *hyperparameters.values(), WINDOW, SCALE)
    together = branches.selected_sliding_forward(q, k, v, indices, k, v, over)
    if together is not None:
        names, tails = ("o_sel", "lse_sel", "o_win", "lse_win"), [tail_of(x).clone() for x in together]
        del together
        apart = [tail_of(x).clone() for x in selected.selected_forward(q, k, v, indices, over_selected)]
        apart += [tail_of(x).clone() for x in ranged.sliding_forward(q, k, v, over.sliding)]
        for name, ours, theirs in zip(names, tails, apart, strict=True):
            close(ours, theirs.double(), name)


def test_combine() -> None:
    # One tensor for all three branches: with one for each they would not fit.
    o, do = normal(LENGTH, HEADS, 0), normal(LENGTH, HEADS, 1)
    gates = normal(LENGTH, HEADS, 2)[..., :3].sigmoid()
    last_o, last_do, last_gates = (tail_of(x).double() for x in (o, do, gates))
    close(tail_of(combine.combine_forward(o, o, o, gates)), last_o * last_gates.sum(-1, keepdim=True), "o")
    product = (last_do * last_o).sum(-1, keepdim=True).expand_as(last_gates)
    *branches, d_gates = combine.combine_backward(do, o, o, o, gates)
    close(tail_of(d_gates), product, "dgates")
    for i, branch in enumerate(branches):
        close(tail_of(branch), last_do * last_gates[..., i : i + 1], f"branch {i}")


def test_compress() -> None:
    # As many groups as heads, so that keys alone pass 2^31 elements.
    k = normal(LENGTH, HEADS, 0)
    n_keys = n_compressed(LENGTH, BLOCK, STRIDE)
    last = k[:, -BLOCK:].double()
    pooling = Pooling(SEQUENCES, BLOCK, STRIDE)
    mean = compress.compress_mean_forward(k, pooling)
    close(mean[:, -1], last.mean(dim=1), "mean")
    dout = normal(n_keys, HEADS, 1)
    # The last tokens are in the last block alone.
    expected = dout[:, -1:].double().expand(-1, STRIDE, -1, -1)
    close(compress.compress_mean_backward(dout, pooling)[:, -STRIDE:], expected / BLOCK, "dk of the mean")
    del mean, dout

    pos = normal(BLOCK, 1, 2)[0, :, 0]
    rows = compress.gather_blocks_forward(k, pos, pooling)
    blocks = rows[:, -1].double().unflatten(-1, (BLOCK, WIDTH))
    close(blocks, last.transpose(1, 2) + pos.double(), "rows")
    dk, _ = compress.gather_blocks_backward(rows, pooling)
    close(dk[:, -STRIDE:], blocks[:, :, -STRIDE:].transpose(1, 2), "dk of the rows")
