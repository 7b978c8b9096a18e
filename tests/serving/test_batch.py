"""Requests in slots of the same caches get the tokens that each would get alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from live_server import tiny_lm

from nsa.generate import generate
from nsa.model import LM
from nsa.serving.batch import SlotBatch

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")),
]


def prompt(length: int) -> list[int]:
    return torch.randint(1, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def alone(model: LM, tokens: Sequence[int], n: int) -> list[int]:
    return generate(model, [list(tokens)], n, temperature=0, cuda_graph=False)[0].tolist()


class Greedy:
    """Feeds each slot the most likely token."""

    def __init__(self, batch: SlotBatch) -> None:
        self.batch = batch
        self.rows: dict[int, list[int]] = {}

    def start(self, slot: int, tokens: Sequence[int]) -> None:
        self.batch.begin_prompt()
        for at in range(0, len(tokens), 16):
            logits = self.batch.extend_prompt(tokens[at : at + 16])
        self.batch.occupy(slot)
        self.rows[slot] = [int(logits.argmax())]

    def step(self) -> None:
        logits = self.batch.step({slot: row[-1] for slot, row in self.rows.items()})
        for slot, row in self.rows.items():
            row.append(int(logits[slot].argmax()))

    def stop(self, slot: int) -> list[int]:
        self.batch.release(slot)
        return self.rows.pop(slot)


@pytest.mark.parametrize("kind", ["nsa", "dense"])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_come_and_go_equal_single_ones(device: str, kind: str) -> None:
    model = tiny_lm(kind).to(device)
    greedy = Greedy(SlotBatch(model, 3, 96))
    greedy.start(1, prompt(40))
    for _ in range(5):
        greedy.step()
    greedy.start(0, prompt(3))
    for _ in range(6):
        greedy.step()
    assert greedy.stop(1) == alone(model, prompt(40), 12)
    # The slot of the one that has ended, by a shorter one.
    greedy.start(1, prompt(9))
    greedy.start(2, prompt(64))
    for _ in range(20):
        greedy.step()
    assert greedy.stop(0) == alone(model, prompt(3), 27)
    assert greedy.stop(1) == alone(model, prompt(9), 21)
    assert greedy.stop(2) == alone(model, prompt(64), 21)


@pytest.mark.parametrize("static", [False, True])
def test_a_row_can_fill_its_slot(static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`static`: the caches of a step in a CUDA graph, without the graph."""
    monkeypatch.setattr("nsa.serving.batch.can_capture", lambda model, options: static)
    monkeypatch.setattr("nsa.serving.batch.Replay", lambda run, capture: run)
    model = tiny_lm()
    greedy = Greedy(SlotBatch(model, 2, 24))
    greedy.start(0, prompt(20))
    greedy.start(1, prompt(5))
    for _ in range(4):
        greedy.step()
    assert greedy.stop(0) == alone(model, prompt(20), 5)
    for _ in range(8):
        greedy.step()
    assert greedy.stop(1) == alone(model, prompt(5), 13)


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    model = tiny_lm()
    batch = SlotBatch(model, 2, 64)
    greedy = Greedy(batch)
    greedy.start(0, prompt(12))
    greedy.start(1, prompt(13))
    for buffer in batch.caches[0].buffers():
        if buffer.is_floating_point():
            buffer[1] = float("nan")
    for _ in range(6):
        greedy.step()
    assert greedy.stop(0) == alone(model, prompt(12), 7)
    # The next request in the spoiled slot.
    greedy.stop(1)
    greedy.start(1, prompt(14))
    for _ in range(6):
        greedy.step()
    assert greedy.stop(1) == alone(model, prompt(14), 7)


@pytest.mark.parametrize("sizes", [(0, 16), (2, 0)])
def test_sizes_of_slots_are_positive(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"n_slots|max_len"):
        SlotBatch(tiny_lm(), *sizes)
