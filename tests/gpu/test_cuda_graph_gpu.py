"""Captures of CUDA graphs beside those that are garbage."""

from __future__ import annotations

import gc

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
