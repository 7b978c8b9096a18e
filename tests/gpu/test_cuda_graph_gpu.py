"""Captures of CUDA graphs beside those that are garbage."""

from __future__ import annotations

import gc

import pytest
import torch

from nsa.cuda_graph import capture_graph


def test_graphs_that_are_garbage_do_not_break_a_capture() -> None:
    x = torch.zeros(8, device="cuda")

    class Cycle:
        """A finished generation holds its graph in a cycle too."""

        def __init__(self) -> None:
            self.own, self.graph = self, capture_graph(lambda: x.add_(1))

    def function() -> None:
        kept = [[] for _ in range(200 * gc.get_threshold()[0])]  # type: ignore[var-annotated]
        assert kept
        x.add_(2)

    for _ in range(3):
        Cycle()
    graph = capture_graph(function)
    graph.replay()
    assert x.tolist() == [2.0] * 8


def test_after_a_failed_capture_all_goes_on() -> None:
    x, first = torch.zeros(8, device="cuda"), torch.get_rng_state()

    def function() -> None:
        x.add_(1)
        # Waits for the device, which a capture does not allow.
        torch.cuda.synchronize()

    torch.manual_seed(1)
    expected = torch.randn(8, device="cuda")
    torch.manual_seed(1)
    with pytest.raises(RuntimeError):
        capture_graph(function)
    assert torch.equal(torch.randn(8, device="cuda"), expected)
    torch.set_rng_state(first)
    capture_graph(lambda: x.add_(2)).replay()
    assert x.tolist() == [2.0] * 8
