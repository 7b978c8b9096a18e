"""The most likely token: that of torch, the first of equal ones, and none where a logit is not finite."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import DEVICE

from nsa.backends.triton import greedy
from nsa.backends.triton.greedy import most_likely
from nsa.generation import sampling
from nsa.generation.options import Options
from nsa.generation.sampling import pick

GREEDY = Options(max_new_tokens=1, temperature=0)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy, "COLUMNS_PER_CTA", 16)
    greedy.plan.cache_clear()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_it_is_what_torch_picks(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 5, 16, 17, 100, 128]))
    # Few values, so that many tie.
    few = st.lists(st.integers(-3, 3), min_size=rows * columns, max_size=rows * columns)
    logits = torch.tensor(data.draw(few), dtype=data.draw(st.sampled_from([torch.float32, torch.float16])))
    logits = logits.view(rows, 1, columns)
    for value in (float("nan"), float("inf"), float("-inf")):
        if data.draw(st.booleans()):
            logits[data.draw(st.integers(0, rows - 1)), 0, data.draw(st.integers(0, columns - 1))] = value
    found = most_likely(logits.to(DEVICE))
    assert torch.equal(found.cpu(), pick(logits, None, GREEDY))


def test_it_picks_unless_there_is_a_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "fused", lambda x: True)
    logits, seen = torch.tensor([[1.0, 3.0, 2.9]], device=DEVICE), torch.tensor([[False, True, False]], device=DEVICE)
    assert pick(logits, None, GREEDY).tolist() == [1]
    assert pick(logits, None, replace(GREEDY, repetition_penalty=1.5), seen).tolist() == [2]
