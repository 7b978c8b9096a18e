"""Problems whose selection is decided by ties, and what is right for them, from integers alone."""

from __future__ import annotations

import torch
from helpers import Case, document_lengths
from hypothesis import strategies as st
from torch import Tensor


@st.composite
def tied_cases(draw: st.DrawFn, *, max_length: int = 150, varlen: bool = False) -> Case:
    """If all keys are equal, every block that is not forced is worth the same: none of them is cut off, neither by the
    beginning of the sequence nor by blocks that are not complete yet."""
    stride, ratio = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    n_init, n_local = draw(st.integers(1, 2)), draw(st.integers(2, 3))
    documents = draw(document_lengths(max_length)) if varlen else None
    return Case(
        length=sum(documents) if documents else draw(st.integers(1, max_length)),
        documents=documents,
        batch=1 if varlen else draw(st.integers(1, 2)),
        groups=draw(st.integers(1, 2)),
        heads=draw(st.sampled_from([1, 2, 3, 6])),
        d_k=draw(st.integers(1, 40)),
        d_v=1,
        stride=stride,
        block=stride * draw(st.integers(1, ratio + 1)),
        select_block=stride * ratio,
        n_init=n_init,
        n_local=n_local,
        n_select=n_init + n_local + draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 2**16)),
    )


def tied_inputs(case: Case, dtype: torch.dtype, n_distinct: int) -> tuple[Tensor, Tensor, list[int]]:
    """Queries, compressed keys of which only `n_distinct` differ, and which of those each one is."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    label = torch.randint(n_distinct, (case.n_compressed,), generator=generator)
    keys = normal(case.batch, n_distinct, case.groups, case.d_k)[:, label]
    return normal(case.batch, case.length, case.n_heads, case.d_k), keys, label.tolist()


def lowest_free_blocks(case: Case, position: int) -> list[int]:
    """The selection at `position` when all keys are equal."""
    own = position // case.select_block
    forced = {j for j in range(own + 1) if j < case.n_init or j > own - case.n_local}
    free = [j for j in range(own + 1) if j not in forced]
    selected = sorted([*forced, *free[: case.n_select - len(forced)]])
    return selected + [-1] * (case.n_select - len(selected))


def pattern(case: Case, position: int, j: int, labels: list[int]) -> tuple[tuple[int, int], ...]:
    """What the importance of block `j` is made of, in order: for each of its compressed blocks the tokens they share
    and which key it is, -1 where it is not seen. `labels` are those of the document alone."""
    first, end = j * case.select_block, (j + 1) * case.select_block
    terms = []
    for start in range(first - case.block + case.stride, end, case.stride):
        seen = start >= 0 and start + case.block - 1 <= position
        shared = min(end, start + case.block) - max(first, start)
        terms.append((shared, labels[start // case.stride] if seen else -1))
    return tuple(terms)


def assert_lower_of_equals(case: Case, selected: Tensor, labels: list[int], position: int) -> None:
    """`selected [n_select]`: of two blocks with the same pattern the later one is taken only if the earlier one is."""
    own = position // case.select_block
    taken = set(selected.tolist())
    left_out = {pattern(case, position, j, labels): j for j in reversed(range(own + 1)) if j not in taken}
    for j in range(case.n_init, own - case.n_local + 1):
        if j in taken:
            earlier = left_out.get(pattern(case, position, j, labels), j)
            assert earlier >= j, f"position {position}: {j} is taken and {earlier}, which is worth the same, is not"
