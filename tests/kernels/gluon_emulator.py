"""Runs Gluon kernels on the CPU, to find what is wrong with their logic without a GPU.

Partitions are threads. Whatever is asynchronous is as late as it may be: a TMA load poisons its buffer when it is
issued and fills it when its barrier is waited for; a product computes when it is waited for, and fails if its operands
were poisoned or have changed since it was issued; a TMA store leaves its buffer when it is waited for. So a missing
wait, a wrong phase and a buffer freed early show up as an error, and a deadlock as one after `PATIENCE_S` seconds.

The warps of a partition do not run apart here. Instead each access to shared memory is checked, whatever its layout: a
load by threads after a store by threads needs a barrier; a TMA store or a product after a store by threads needs a
fence and then a barrier; a write, by threads or TMA, of what the same partition has read needs the read to be waited
for and a barrier.

Not seen: layouts, registers, scratch that Triton allocates, and whether all warps of a partition are done with a buffer
when it arrives at an mbarrier.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from waiting import PATIENCE_S

# How long a partition may pause at a barrier, so that runs interleave differently.
PAUSE = 0.0003


class Tile(Tensor):
    """A tensor in registers, with what kernels ask of it beside arithmetic."""

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Tile:
        return self.view(dtype) if bitcast else super().to(dtype)


def tile(x: Tensor) -> Tile:
    return x.as_subclass(Tile)


class Partition(threading.local):
    """What a partition has in flight, and the buffers that it accessed since its last barrier."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.stores: list[tuple[Descriptor, list[int], Shared, Tensor]] = []
        self.accessed: set[Accesses] = set()


PARTITION = Partition()
GRID = SimpleNamespace(program=0, programs=1)
# Of the partitions that run: the others stop waiting once there is one.
FAILURES: list[BaseException] = []


class Accesses:
    """Accesses to a buffer that no barrier has ordered yet."""

    def __init__(self) -> None:
        # `fence`: "missing" after a store by threads, "issued" until the next barrier, then "".
        self.stored, self.fence, self.leaving = False, "", 0
        self.readers: set[int] = set()

    def read(self) -> None:
        self.readers.add(threading.get_ident())
        PARTITION.accessed.add(self)

    def load(self) -> None:
        assert not self.stored, "a load of what other warps may not have stored yet: no barrier"
        self.read()

    def read_async(self) -> None:
        assert self.fence != "missing", "TMA or a product reads what was stored without a fence"
        assert not self.fence, "TMA or a product reads what other warps may not have stored yet: no barrier"

    def write(self) -> None:
        assert not self.leaving, "a buffer is written that a TMA store may still read: no wait"
        assert threading.get_ident() not in self.readers, "a buffer is written that may still be read: no barrier"

    def store(self) -> None:
        self.write()
        self.stored, self.fence = True, "missing"
        PARTITION.accessed.add(self)

    def fill(self) -> None:
        self.write()
        # Other partitions are waited for at an mbarrier.
        self.stored, self.fence = False, ""
        self.readers.clear()


def fence_async_shared() -> None:
    for x in PARTITION.accessed:
        x.fence = x.fence and "issued"


def barrier() -> None:
    for x in PARTITION.accessed:
        x.stored = False
        x.readers.discard(threading.get_ident())
        x.fence = "" if x.fence == "issued" else x.fence
    PARTITION.accessed = {x for x in PARTITION.accessed if x.fence}


class Shared:
    """Shared memory: a view of a tensor, and the accesses to each buffer of an array of them."""

    def __init__(self, values: Tensor, accesses: Any = None) -> None:
        self.values, self.dtype = values, values.dtype
        self.accesses = accesses or Accesses()

    def index(self, i: int) -> Shared:
        return Shared(self.values[i], self.accesses[i])

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.values.view(shape), self.accesses)

    def permute(self, order: list[int]) -> Shared:
        return Shared(self.values.permute(order), self.accesses)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        """An array of tiles as one of boxes `[1, 1, rows, columns]`: as swizzled layouts have it, a tile is one column
        block after the other, and each of these one box after the other."""
        rows, columns = shape[-2:]
        boxes = [
            Shared(box[None, None], accesses)
            for tile, accesses in zip(self.values, self.accesses, strict=True)
            for block in tile.split(columns, 1)
            for box in block.split(rows, 0)
        ]
        assert (self.dtype, len(boxes)) == (dtype, shape[0])
        return SimpleNamespace(index=boxes.__getitem__)

    def store(self, x: Tensor) -> None:
        assert x.dtype == self.dtype
        self.accesses.store()
        self.values.copy_(x)

    def load(self, layout: Any = None) -> Tile:
        self.accesses.load()
        return tile(self.values.clone())


class Descriptor:
    """A TMA descriptor: boxes of a tensor, zeros outside."""

    def __init__(self, x: Tensor, box: tuple[int, ...]) -> None:
        self.x, self.box, self.dtype, self.layout = x, box, x.dtype, None
        self.block_type = SimpleNamespace(shape=list(box), nbytes=torch.Size(box).numel() * x.element_size())

    def overlap(self, corner: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of the tensor and of the box is the same."""
        inside, within = [], []
        for start, size, limit in zip(corner, self.box, self.x.shape, strict=True):
            low, high = max(start, 0), max(min(start + size, limit), max(start, 0))
            inside.append(slice(low, high))
            within.append(slice(low - start, high - start))
        return tuple(inside), tuple(within)


class Pointer:
    def __init__(self, x: Tensor, offset: Any = 0) -> None:
        self.x, self.offset = x, offset
        self.dtype = SimpleNamespace(element_ty=x.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.x, self.offset + offset)

    @property
    def flat(self) -> Tensor:
        return torch.as_strided(self.x, (self.x.untyped_storage().nbytes() // self.x.element_size(),), (1,), 0)


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes that were announced have come."""

    # One for all, so that a failure wakes every partition.
    changed = threading.Condition()

    def __init__(self) -> None:
        self.phase = self.count = self.missing = self.bytes = 0
        self.loads: list[Callable[[], int]] = []

    def settle(self) -> None:
        assert self.missing >= 0, "more arrivals than the barrier counts"
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count
            self.changed.notify_all()


class Barriers:
    def __init__(self, n: int) -> None:
        self.barriers = [Barrier() for _ in range(n)]

    def index(self, i: int) -> Barrier:
        return self.barriers[i]


def one(barrier: Barrier | Barriers) -> Barrier:
    return barrier if isinstance(barrier, Barrier) else barrier.index(0)


class Product:
    """`left @ right + before`, computed when it is waited for; nothing else may be done with it until then."""

    def __init__(self, left: Any, right: Shared, before: Any) -> None:
        self.operands, self.before, self.result = (left, right), before, None
        for x in self.shared():
            x.accesses.read_async()
        self.issued = [self.value(x).clone() for x in self.operands]

    def shared(self) -> list[Shared]:
        return [x for x in self.operands if isinstance(x, Shared)]

    @staticmethod
    def value(x: Any) -> Tensor:
        return x.values if isinstance(x, Shared) else x

    def finish(self) -> None:
        for x, issued in zip(self.operands, self.issued, strict=True):
            assert issued.isfinite().all(), "a product of what was not loaded"
            assert torch.equal(self.value(x), issued), "an operand changed under a product"
        for x in self.shared():
            x.accesses.read()
        left, right = (x.float() for x in self.issued)
        before = self.before.result if isinstance(self.before, Product) else self.before
        self.result = tile(left @ right if before is None else left @ right + before)


class mbarrier:
    MBarrierLayout = staticmethod(lambda: "mbarrier")

    @staticmethod
    def init(barrier: Any, count: int) -> None:
        one(barrier).count = one(barrier).missing = count

    @staticmethod
    def expect(barrier: Any, n_bytes: int) -> None:
        with one(barrier).changed:
            one(barrier).bytes += n_bytes
            one(barrier).missing -= 1

    @staticmethod
    def arrive(barrier: Any, count: int = 1) -> None:
        time.sleep(random.random() * PAUSE)
        with one(barrier).changed:
            one(barrier).missing -= count
            one(barrier).settle()

    @staticmethod
    def wait(barrier: Any, parity: int) -> None:
        barrier = one(barrier)
        with barrier.changed:

            def done() -> bool:
                if barrier.phase % 2 == parity:
                    while barrier.loads:
                        barrier.bytes -= barrier.loads.pop(0)()
                    assert barrier.bytes >= 0, "more bytes than were announced"
                    if barrier.missing < barrier.count:
                        barrier.settle()
                return barrier.phase % 2 != parity or bool(FAILURES)

            assert barrier.changed.wait_for(done, PATIENCE_S), "deadlock"
            assert not FAILURES, "another partition failed"
        time.sleep(random.random() * PAUSE)


class tma:
    @staticmethod
    def async_copy_global_to_shared(source: Descriptor, corner: list[int], barrier: Any, target: Shared) -> None:
        target.accesses.fill()
        target.values.fill_(float("nan"))

        def load() -> int:
            inside, within = source.overlap(corner)
            box = torch.zeros(source.box, dtype=source.dtype)
            box[within] = source.x[inside]
            target.values.copy_(box)
            return source.block_type.nbytes

        with one(barrier).changed:
            one(barrier).loads.append(load)
            one(barrier).changed.notify_all()

    @staticmethod
    def async_copy_shared_to_global(target: Descriptor, corner: list[int], source: Shared) -> None:
        source.accesses.read_async()
        source.accesses.leaving += 1
        PARTITION.stores.append((target, corner, source, source.values.clone()))

    @staticmethod
    def store_wait(pending: int) -> None:
        while len(PARTITION.stores) > pending:
            target, corner, source, issued = PARTITION.stores.pop(0)
            # Rows past the end may be NaN.
            same = torch.isclose(source.values, issued, rtol=0, atol=0, equal_nan=True)
            assert same.all(), "a buffer changed before it was stored"
            inside, within = target.overlap(corner)
            target.x[inside] = issued[within]
            # Known to the warp that waits, not to the others.
            source.accesses.leaving -= 1
            source.accesses.read()


def warpgroup_mma(left: Any, right: Shared, before: Any, *, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async, "the kernels wait for products themselves"
    PARTITION.products.append(Product(left, right, before if use_acc else None))
    return PARTITION.products[-1]


def warpgroup_mma_wait(pending: int, deps: list[Any]) -> Any:
    while len(PARTITION.products) > pending:
        PARTITION.products.pop(0).finish()
    ready = tuple(x.result if isinstance(x, Product) else x for x in deps)
    assert all(x is not None for x in ready), "the wait leaves a product in flight that is used"
    return ready if len(ready) > 1 else ready[0]


def either(tensors: Callable[..., Tensor], scalars: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors or of Python's numbers."""

    def call(*args: Any) -> Any:
        if not any(isinstance(x, Tensor) for x in args):
            return scalars(*args)
        return tensors(*(x if isinstance(x, Tensor) else torch.as_tensor(x) for x in args))

    return call


def load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Any:
    if not isinstance(pointer.offset, Tensor):
        return pointer.flat[pointer.offset].item()
    offset = pointer.offset.as_subclass(Tensor)
    if mask is None:
        return tile(pointer.flat[offset])
    mask = mask.as_subclass(Tensor).expand(offset.shape)
    return tile(torch.where(mask, pointer.flat[torch.where(mask, offset, 0)], other))


def store(pointer: Pointer, x: Tensor, mask: Tensor, eviction_policy: str = "") -> None:
    offset, x, mask = torch.broadcast_tensors(*(y.as_subclass(Tensor) for y in (pointer.offset, x, mask)))
    pointer.flat[offset[mask]] = x[mask]


def atomic_add(pointer: Pointer, x: int, sem: str) -> None:
    pointer.flat[pointer.offset] += x


def allocate_shared_memory(dtype: Any, shape: list[int], layout: Any) -> Any:
    if layout == "mbarrier":
        return Barriers(shape[0])
    poison = float("nan") if dtype.is_floating_point else -(2**30)
    return Shared(torch.full(shape, poison, dtype=dtype), [Accesses() for _ in range(shape[0])])


def warp_specialize(partitions: list[tuple[Callable[..., Any], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    barrier()

    def run(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            function(*args)
            assert not [*PARTITION.products, *PARTITION.stores], "something is still in flight at the end"
        except BaseException as failure:  # noqa: BLE001
            with Barrier.changed:
                FAILURES.append(failure)
                Barrier.changed.notify_all()

    threads = [threading.Thread(target=run, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures = FAILURES[:]
    FAILURES.clear()
    if failures:
        # The others fail because of it.
        raise failures[0]


def ignored(*args: Any, **kwargs: Any) -> None:
    return None


gl = SimpleNamespace(
    float32=torch.float32,
    int32=torch.int32,
    int64=torch.int64,
    minimum=either(torch.minimum, min),
    maximum=either(torch.maximum, max),
    where=either(torch.where, lambda condition, x, y: x if condition else y),
    max=lambda x, axis: x.amax(axis),
    sum=lambda x, axis: x.sum(axis),
    exp2=torch.exp2,
    log2=torch.log2,
    cast=lambda x, dtype: x.to(dtype) if isinstance(x, Tensor) else x,
    full=lambda shape, x, dtype, layout: tile(torch.full(shape, x, dtype=dtype)),
    gather=lambda x, index, axis: x.gather(axis, index),
    zeros=lambda shape, dtype, layout: tile(torch.zeros(shape, dtype=dtype)),
    arange=lambda start, stop, layout: tile(torch.arange(start, stop)),
    convert_layout=lambda x, layout: x,
    static_range=range,
    program_id=lambda axis: GRID.program,
    num_programs=lambda axis: GRID.programs,
    inline_asm_elementwise=lambda asm, constraints, args, **options: args[0],
    NVMMADistributedLayout=ignored,
    NVMMASharedLayout=ignored,
    SwizzledSharedLayout=ignored,
    DotOperandLayout=ignored,
    SliceLayout=ignored,
    BlockedLayout=ignored,
    load=load,
    store=store,
    atomic_add=atomic_add,
    allocate_shared_memory=allocate_shared_memory,
    warp_specialize=warp_specialize,
)
NAMES = {
    "gl": gl,
    "tl": gl,
    "mbarrier": mbarrier,
    "tma": tma,
    "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_wait": warpgroup_mma_wait,
    "fence_async_shared": fence_async_shared,
    "barrier": barrier,
}


def plain(kernel: Any) -> Callable[..., Any]:
    """A jitted function, and all it calls, as Python over the functions above."""
    function = kernel.fn
    names = {}
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if name in NAMES:
            names[name] = NAMES[name]
        elif hasattr(value, "fn"):
            names[name] = plain(value)
        elif value is not None:
            names[name] = getattr(value, "value", value)
    names["__builtins__"] = __builtins__
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


def run(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
    """Runs one CTA after the other. Tensors are passed as pointers; descriptors are those of this module."""
    emulated = plain(kernel)
    arguments = {name: Pointer(x, x.storage_offset()) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    GRID.programs = grid[0]
    # A test that failed may have left something.
    PARTITION.__init__()
    for GRID.program in range(grid[0]):
        emulated(**arguments)
        assert not PARTITION.products, "something is still in flight at the end"
