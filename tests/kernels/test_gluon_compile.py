"""The Gluon kernels compile for sm_90, fit its shared memory, and leave ptxas in the order that makes them fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need Triton")

import sass
from compiling import TARGETS
from gluon_compiling import SHAPES, Compiled, Loop, hazards, n_loads, order, read, scratch

from nsa.backends import gluon

# By shape and branch, those that run there: the others of a backward pass are Triton's.
FORWARD, KEYS, QUERIES = "hopper_forward_kernel", "hopper_dkv_kernel", "hopper_dq_kernel"
FUSED, PARTIALS, BLOCKS = "hopper_selected_sliding_kernel", "hopper_block_kernel", "hopper_block_backward_kernel"
RUN = {
    ("64/4/128", "compressed"): {FORWARD, KEYS, QUERIES},
    ("64/4/128", "sliding"): {FORWARD, KEYS, QUERIES},
    ("32/8/128 varlen", "compressed"): {FORWARD, KEYS},
    ("32/8/128 varlen", "sliding"): {FORWARD, KEYS, QUERIES},
    ("64/4/128 offset", "compressed"): {FORWARD, KEYS},
    ("64/4/128 offset", "sliding"): {FORWARD, KEYS},
    ("16/2/128 varlen", "compressed"): {FORWARD, KEYS},
    ("16/2/128 varlen", "sliding"): {FORWARD, KEYS, QUERIES},
    ("64/4/128 fp16 8k", "compressed"): {FORWARD, KEYS, QUERIES},
    ("64/4/128 fp16 8k", "sliding"): {FORWARD, KEYS, QUERIES},
    ("64/4/128", "selected"): {PARTIALS, BLOCKS},
    ("16/2/128 varlen", "selected"): {PARTIALS, BLOCKS},
    ("64/4/128 offset", "selected"): {PARTIALS, BLOCKS},
    ("64/4/128 fp16 8k", "selected"): {PARTIALS, BLOCKS},
    # Of 4 and 6 heads per group, and of head_dim 64.
    ("32/8/128 varlen", "selected"): set(),
    ("12/2/128", "selected"): set(),
    ("32/8/64", "selected"): set(),
    # Not varlen, there.
    ("64/4/128", "fused"): {FUSED},
    ("32/8/128 varlen", "fused"): {FUSED},
    ("16/2/128 varlen", "fused"): {PARTIALS, FUSED},
    ("64/4/128 fp16 8k", "fused"): {FUSED},
    ("64/4/128 offset", "fused"): set(),
    ("32/8/64", "fused"): set(),
    ("12/2/128", "fused"): set(),
}
# Per loop. Forward: the softmax of one tile while the values of the one before are multiplied. dk, dv: the exponentials
# while dP is computed, dS while dV is. dq is bound by memory; so is the fused kernel, which adds while it multiplies.
# The selected forward: a partial output is written while the next scores are computed. The selected backward: the
# exponentials while dP is computed.
ORDER = {
    FORWARD: ["product", "wait 1", "exp", "wait 0"],
    KEYS: ["product", "wait 1", "exp", "product", "wait 1", "product", "wait 0"],
    QUERIES: ["product", "wait 0"],
    FUSED: ["product", "wait 0", "exp", "product", "wait 0"],
    PARTIALS: ["exp", "product", "wait 1", "wait 0"],
    BLOCKS: ["product", "wait 1", "exp", "wait 0", "product", "wait 0", "product", "wait 0"],
}
# Elements of a partial output per thread. The fused kernel adds as many before each wait, but in its two loops over
# common blocks.
PARTIAL = 64
ADDING = 2 * [[0, 0]] + 4 * [[1, 1]]
# Masked and unmasked, in each of two warpgroups; dq has no mask, the fused kernel a loop over common blocks too. The
# selected forward and backward are one loop of one warpgroup.
LOOPS = {FORWARD: 4, KEYS: 4, QUERIES: 2, FUSED: 6, PARTIALS: 1, BLOCKS: 1}
# In a loop, where dS is kept: coordinates of its tile. In the selected backward: addresses.
KEPT_SPILLS, BLOCKS_SPILLS = 12, 16


def compiled(shape: str, folder: Path) -> list[Compiled]:
    """What `gluon_compiling.py` finds, in a process of its own: it stands in for Triton's driver."""
    command = [sys.executable, str(Path(__file__).with_name("gluon_compiling.py")), "--shapes", shape]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1", "NSA_TUNED_TILES": os.devnull}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [Compiled(**x) for x in json.loads(done.stdout)]
    for x in found:
        x.loops = [Loop(**loop) for loop in x.loops]
    return found


@pytest.mark.slow
@pytest.mark.skipif(gluon.import_failure() is not None, reason=str(gluon.import_failure()))
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_compile_into_the_order_that_is_fast(shape: str, tmp_path: Path) -> None:
    found = compiled(shape, tmp_path)
    expected = {
        branch: RUN.get((shape, branch), {FORWARD}) for branch in ("compressed", "sliding", "selected", "fused")
    }
    assert {(x.branch, x.kernel) for x in found} == {(b, k) for b, kernels in expected.items() for k in kernels}
    wrong = []
    for x in found:
        where = f"{x.branch} {x.kernel}"
        if x.shared > TARGETS["sm_90"].shared:
            wrong.append(f"{where}: {x.shared} bytes of shared memory")
        if sass.serialized(x.products, x.waits):
            wrong.append(f"{where}: {x.products} products with {x.waits} waits")
        wrong += [f"{where}: {what}" for what in [*x.overwritten, *x.hazards]]
        wrong += [f"{where}: {what} before warp specialization" for what in x.scratch]
        # The others leave results of functions unused, and so their loads.
        if x.kernel in (FUSED, PARTIALS, BLOCKS) and x.lost_loads:
            wrong.append(f"{where}: {x.lost_loads} loads were taken for dead")
        kept = KEPT_SPILLS if x.kernel == KEYS and QUERIES in expected[x.branch] else 0
        spills = BLOCKS_SPILLS if x.kernel == BLOCKS else kept
        if len(x.loops) != LOOPS[x.kernel]:
            wrong.append(f"{where}: {len(x.loops)} loops with products")
        for loop in x.loops:
            wrong += [f"{where}: {what}" for what in loop.hazards]
            if loop.spills > spills:
                wrong.append(f"{where}: {loop.spills} spills in a loop")
            if loop.order != ORDER[x.kernel]:
                wrong.append(f"{where}: {loop.order}")
        if x.kernel == FUSED and sorted([n // PARTIAL for n in loop.sums] for loop in x.loops) != ADDING:
            wrong.append(f"{where}: {[loop.sums for loop in x.loops]} additions before waits")
    assert not wrong, "\n".join(wrong)


# Two groups of products, the softmax of the first while the second is in flight.
LOOP = """
    /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16], RZ, !UPT, gsb0 ;
    /*0020*/                   HGMMA.64x64x16.F32.BF16 R56, R8, gdesc[UR16], R56, gsb0 ;
    /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
    /*0040*/                   MUFU.EX2 R4, R24 ;
    /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
    /*0060*/                   FMUL R56, R56, R4 ;
    /*0070*/               @P0 BRA 0x10 ;
"""


def test_the_order_of_a_loop_is_read() -> None:
    (loop,) = read(LOOP)
    assert loop == Loop(["product", "wait 1", "exp", "wait 0"], [0, 0], 0, [])
    (early,) = read(LOOP.replace("0x1 ;", "0x0 ;"))
    assert early.order == ["product", "wait 0", "exp", "wait 0"]
    (adding,) = read(LOOP.replace("MUFU.EX2 R4, R24", "FADD R4, R24, R5"))
    assert adding.sums == [0, 1]
    (behind,) = read(LOOP.replace("FMUL R56, R56, R4", "FFMA R56, R56, R4, R5"))
    assert behind.sums == [0, 0]


@pytest.mark.parametrize(
    ("present", "instead"),
    [
        ("MUFU.EX2 R4, R24", "MUFU.EX2 R8, R24"),
        ("MUFU.EX2 R4, R24", "MUFU.EX2 R4, R57"),
        ("gsb0, 0x1", "gsb0, 0x2"),
        ("gsb0, 0x0 ;", "gsb0, 0x1 ;"),
    ],
    ids=["left-operand-written", "sum-read", "first-product-in-flight", "sum-rescaled-in-flight"],
)
def test_registers_of_a_product_in_flight_are_found(present: str, instead: str) -> None:
    assert present in LOOP
    (loop,) = read(LOOP.replace(present, instead))
    assert loop.hazards


# As after the loop of the forward pass: the last product, and the division of its sum.
END = """
    /*0080*/                   HGMMA.64x64x16.F32.BF16 R56, R8, gdesc[UR16], R56, gsb0 ;
    /*0090*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
    /*00a0*/                   FMUL R56, R56, R4 ;
"""


def test_a_product_after_the_loops_is_read() -> None:
    assert hazards(sass.instructions(LOOP + END)) == []
    early = LOOP + END.replace("gsb0, 0x0", "gsb0, 0x1")
    assert read(early)[0].hazards == []
    assert hazards(sass.instructions(early)) == ["FMUL at 0xa0 under 0x80"]


def test_a_spill_in_a_loop_is_found() -> None:
    (loop,) = read(LOOP.replace("MUFU.EX2 R4, R24 ;", "LDL R4, [R1] ;"))
    assert loop.spills == 1
    assert (order(sass.instructions(LOOP)), hazards(sass.instructions(LOOP))) == (read(LOOP)[0].order, [])


def test_loads_are_counted_as_often_as_they_run() -> None:
    source = """
  tt.func public @kernel(%p: !tt.ptr<i32>) {
    %0 = tt.load %p : !tt.ptr<i32>
    tt.call @"twice__(1,)c"(%p) : (!tt.ptr<i32>) -> ()
    tt.call @"twice__(1,)c"(%p) : (!tt.ptr<i32>) -> ()
  }
  tt.func private @"twice__(1,)c"(%p: !tt.ptr<i32>) {
    %0 = tt.load %p : !tt.ptr<i32>
    tt.call @one(%p) : (!tt.ptr<i32>) -> ()
  }
  tt.func private @one(%p: !tt.ptr<i32>) {
    %0 = tt.load %p : !tt.ptr<i32>
  }
"""
    assert n_loads(source) == 5


def test_scratch_before_warp_specialization_is_found() -> None:
    source = """
    %0 = "tt.reduce"(%x) <{axis = 0 : i32}> ({
    ttg.warp_specialize(%0) attributes {requestedRegisters = array<i32: 24>}
    default {
      %1 = ttg.convert_layout %y : tensor<64xf32, #a> -> tensor<64xf32, #b>
"""
    assert scratch(source) == ["tt.reduce"]
    assert scratch(source.replace("tt.reduce", "tt.load")) == []
    assert scratch(source.replace("ttg.warp_specialize(", "ttg.other(")) == []
