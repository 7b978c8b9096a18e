"""A second stream for work that does not depend on what runs at the same time.

Tensors of a call are allocated while its own stream is the current one, before the fork, and freed after the streams
have joined: then the allocator, which orders memory by the stream that requested it, needs to know of no other, and a
CUDA graph that captures the call owns all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache

import torch

Stream = torch.cuda.Stream


@lru_cache(maxsize=32)
def second_stream(device: torch.device, first: int) -> Stream:
    """A second stream for calls on the stream `first`: one that another thread captures must not be joined by the work
    of this one."""
    del first
    return Stream(device)


@contextmanager
def forked(device: torch.device) -> Iterator[tuple[Stream, Stream] | tuple[None, None]]:
    """The current stream, and another that starts where it is and has joined it again when the block ends. What either
    uses has to be allocated before the block and freed after it. A CPU, which interprets kernels, has none."""
    if device.type != "cuda":
        yield None, None
        return
    here = torch.cuda.current_stream(device)
    other = second_stream(device, here.cuda_stream)
    other.wait_stream(here)
    try:
        yield here, other
    finally:
        here.wait_stream(other)


def launching_on(stream: Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
