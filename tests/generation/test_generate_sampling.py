"""What the filters leave of a distribution, and what is drawn from it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa.generation.options import Options
from nsa.generation.sampling import MAX_DRAW, draws, filtered, penalize, pick

# Quarters, so that many tie.
LOGITS = st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=1, max_size=12)
FILTERS = st.fixed_dictionaries(
    {
        "top_k": st.none() | st.integers(1, 12),
        "top_p": st.none() | st.floats(0.01, 1.0),
        "min_p": st.none() | st.floats(0.0, 1.0),
    }
)


def options(**changes: object) -> Options:
    return Options(**{"max_new_tokens": 4, **changes})


def kept_by_definition(p: list[float], top_k: int | None, top_p: float | None, min_p: float | None) -> set[int]:
    """One token after the other, the most likely first, in plain Python."""
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))[: top_k or len(p)]
    total, kept, mass = sum(p[token] for token in order), set(), 0.0
    for token in order:
        if top_p is not None and mass >= top_p * total:
            break
        mass += p[token]
        if min_p is None or p[token] >= min_p * p[order[0]]:
            kept.add(token)
    return kept


@given(LOGITS, FILTERS)
def test_filters_keep_what_their_definitions_keep(logits: list[float], filters: dict[str, float | None]) -> None:
    p = torch.tensor([logits]).softmax(dim=-1)
    left, tokens = filtered(p, options(**filters))
    kept = {token for token, x in zip(tokens[0].tolist(), left[0].tolist(), strict=True) if x > 0}
    assert kept
    assert int(p.argmax()) in kept
    # Where a sum lies within rounding of top_p, either answer is right.
    top_p = filters["top_p"]
    bounds = [None] if top_p is None else [top_p * (1 - 1e-6), min(1.0, top_p * (1 + 1e-6))]
    allowed = [kept_by_definition(p[0].tolist(), **{**filters, "top_p": bound}) for bound in bounds]
    assert allowed[0] <= kept <= allowed[-1]
    assert torch.equal(left[left > 0], p.gather(1, tokens)[left > 0])


@given(LOGITS, FILTERS, st.floats(0, 1, exclude_max=True))
def test_a_drawn_token_is_one_that_the_filters_keep(
    logits: list[float], filters: dict[str, float | None], draw: float
) -> None:
    how = options(**filters)
    left, tokens = filtered(torch.tensor([logits]).softmax(dim=-1), how)
    number = torch.tensor([min(draw, MAX_DRAW)], dtype=torch.float64)
    token = int(pick(torch.tensor([logits]), number, how))
    assert token in tokens[0][left[0] > 0].tolist()


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"temperature": 2.0}])
def test_frequencies_are_the_probabilities(filters: dict[str, float]) -> None:
    logits = torch.tensor([[0.5, 2.0, -1.0, 1.0, 0.0]])
    n, how = 20_000, options(**filters)
    p = (logits / how.temperature).softmax(dim=-1)
    left, tokens = filtered(p, how)
    expected = torch.zeros(5).scatter(0, tokens[0], left[0] / left.sum())
    # Evenly spread numbers hit each token as often as its probability says, up to one.
    even = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    counts = pick(logits.expand(n, -1), even, how).bincount(minlength=5)
    assert (counts / n - expected).abs().max() <= 2 / n


def test_greedy_takes_the_first_of_the_most_likely() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 0.0, 1.0]])
    assert pick(logits, torch.zeros(2), options(temperature=0)).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_no_token(value: float, temperature: float) -> None:
    logits = torch.tensor([[1.0, value, 3.0], [5.0, 0.0, 1.0]])
    picked = pick(logits, torch.zeros(2, dtype=torch.float64), options(temperature=temperature))
    assert picked.tolist() == [-1, 0]


@given(LOGITS, st.floats(0.5, 4.0))
def test_the_penalty_moves_seen_tokens_alone_and_toward_less(logits: list[float], penalty: float) -> None:
    x = torch.tensor([logits])
    seen = torch.arange(x.shape[1])[None] % 2 == 0
    y = penalize(x, seen, penalty)
    assert torch.equal(y[~seen], x[~seen])
    below = x[seen] - y[seen]
    assert (below >= 0).all() if penalty >= 1 else (below <= 0).all()


def test_draws_depend_on_the_seed_and_the_row_alone() -> None:
    def table(seed: int, n: int, batch_size: int) -> Tensor:
        return draws(options(max_new_tokens=n, seed=seed), batch_size, n, torch.device("cpu"))

    whole = table(5, 40, 3)
    assert torch.equal(table(5, 17, 3), whole[:, :17])
    assert torch.equal(table(7, 40, 1), whole[2:])
    assert len(whole.unique()) == whole.numel()
    assert whole.min() >= 0
    assert whole.max() < 1
