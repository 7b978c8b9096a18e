"""Every kernel, with the tiles its launcher picks, compiles for every supported GPU, fits its shared memory, and has
come out neither of ptxas with serialized products or with one that reads registers since given away, nor of Triton with
a sum that mistakes its warps.

No GPU is needed: `compiling.py` stands in for one, in a process of its own for each target. `pytest -s` prints what
each kernel takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need Triton")

from compiling import SHAPES, TARGETS, TENSOR_MEMORY, Compiled, table
from layouts import mistaken
from sass import overwritten, products_and_waits, serialized

# All of half precision where tiles were measured. Elsewhere what four minutes of one core allow: sm_80, 86 and 89 have
# the same tiles, so their shapes are shared out. The longest first: a worker has one to itself.
PICKED = {
    "sm_90": ["64/4/128", "32/8/128 varlen", "32/8/64", "32/8/64 offset", "192/128", "256"],
    "sm_80": ["64/4/128"],
    "sm_86": ["64/1/256", "32/1/256 fp32"],
    "sm_89": ["192/128"],
    "sm_100": ["64/4/128", "256"],
    "sm_120": ["12/2/64", "64/4/128 fp32"],
}

# More than this many registers kept in memory is a tile to change.
SPILLS = 128
# Correct and slow: wide heads in fp32, whose products are not the tensor cores'. (As on Hopper, not compiled here.)
SPILLING = {"32/1/256 fp32"}
# Kernels of these shapes that are serialized on purpose. The forwards of head_dim 128 are held to 128 registers of the
# 149 they need: two CTAs per SM of serialized products beat one CTA of products that overlap.
SERIALIZED = {("64/4/128", "ranged_forward_kernel"), ("32/8/128 varlen", "ranged_forward_kernel")}


def compiled(target: str, folder: Path) -> list[Compiled]:
    """What `compiling.py` finds for the shapes picked."""
    found = folder / "found.json"
    command = [sys.executable, str(Path(__file__).with_name("compiling.py")), "--target", target]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    # The packaged tiles, not those of whoever runs this.
    environment |= {"NSA_TUNED_TILES": os.devnull}
    done = subprocess.run(
        [*command, "--shapes", *PICKED[target], "--out", str(found)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [Compiled(**x) for x in json.loads(found.read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("target", PICKED)
def test_kernels_compile_and_fit(target: str, tmp_path: Path) -> None:
    found = compiled(target, tmp_path)
    print(f"\n{table(target, found)}")
    limit = TARGETS[target].shared
    wrong = [f"{x.kernel}: {x.error}" for x in found if x.error]
    for shape in PICKED[target]:
        names, sizes = {x.kernel for x in found if x.shape == shape}, SHAPES[shape]
        assert {"ranged_forward_kernel", "query_kernel", "block_kernel"} <= names
        assert sizes.selected_only or "score_kernel" in names
        assert sizes.offset or "block_backward_kernel" in names
        assert sizes.offset or sizes.selected_only or {"ranged_dq_kernel", "ranged_dkv_kernel"} <= names
    for x in found:
        where = f"{target} {x.shape} {x.branch} {x.kernel}"
        if x.shared > limit:
            wrong.append(f"{where}: {x.shared} bytes of shared memory, {limit} there are")
        if x.tensor_memory > TENSOR_MEMORY:
            wrong.append(f"{where}: {x.tensor_memory} columns of tensor memory, {TENSOR_MEMORY} there are")
        wrong += [f"{where}: {what}" for what in (*x.overwritten, *x.mistaken)]
        if serialized(x.products, x.waits) != ((x.shape, x.kernel) in SERIALIZED and target == "sm_90"):
            wrong.append(f"{where}: {x.products} products with {x.waits} waits, see SERIALIZED")
        if x.spills > SPILLS and x.shape not in SPILLING:
            wrong.append(f"{where}: {x.spills} registers spilled")
    assert not wrong, "\n".join(wrong)


# A loop that multiplies R8 to R11, loaded before it, and then puts something else into R10.
LOOP = """
    /*0010*/                   LDSM.16.M88.4 R8, [R7] ;
    /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR16], RZ, !UPT, gsb0 ;
    /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
    /*0040*/              @!P1 F2FP.BF16.F32.PACK_AB R10, R25, R24 ;
    /*0050*/               @P0 BRA 0x20 ;
"""


def test_an_operand_given_away_is_found() -> None:
    assert overwritten(LOOP) == ["HGMMA.64x64x16.F32.BF16 at 0x20: R10 is written later in the loop"]


@pytest.mark.parametrize(
    ("present", "instead"),
    [
        ("BRA 0x20", "BRA 0x10"),
        ("PACK_AB R10,", "PACK_AB R12,"),
        ("F2FP.BF16.F32.PACK_AB", "STS"),
        ("R8, gdesc", "gdesc"),
    ],
    ids=["loaded-each-time", "another-register", "read-only", "in-shared-memory"],
)
def test_an_operand_that_lasts_is_not(present: str, instead: str) -> None:
    assert present in LOOP
    assert overwritten(LOOP.replace(present, instead)) == []


# Two dots of two products each: one wait for both, and one wait for each product.
PIPELINED = """
    /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR16], RZ, !UPT ;
    /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, R12, gdesc[UR20], R24, gsb0 ;
    /*0030*/                   HGMMA.64x64x16.F32.BF16 R56, R8, gdesc[UR16], RZ, !UPT ;
    /*0040*/                   HGMMA.64x64x16.F32.BF16 R56, R12, gdesc[UR20], R56, gsb0 ;
    /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
"""
WAIT = "/*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"


def test_a_wait_for_every_product_is_found() -> None:
    assert products_and_waits(PIPELINED) == (4, 1)
    assert not serialized(*products_and_waits(PIPELINED))
    assert serialized(*products_and_waits(PIPELINED + 3 * WAIT))
    # Kernels without products have no waits either.
    assert not serialized(*products_and_waits(""))


# Rows of a product that tensor cores did not make, put in the order that is made for those that they did.
REDUCTION = """
#linear = #ttg.linear<{register = [[0, 2, 0]], lane = [[0, 0, 4], [0, 0, 8]], warp = [[2, 0, 0], [0, 1, 0], [4, 0, 0]], block = []}>
  %1 = "tt.reduce"(%0) <{axis = 1 : i32}> ({
  ^bb0(%a: f32, %b: f32):
    tt.reduce.return %a : f32
  }) : (tensor<16x4x32xf32, #linear>) -> tensor<16x32xf32, #ttg.slice<{dim = 1, parent = #linear}>>
"""  # noqa: E501


def test_a_sum_over_mistaken_warps_is_found() -> None:
    (found,) = mistaken(REDUCTION)
    assert found.startswith("a reduction of dimension 1 over warps [(2, 0, 0), (0, 1, 0), (4, 0, 0)]")
    assert mistaken(REDUCTION.replace("f32, #linear>) ->", "f32, #linear>, tensor<16x4x32xi32, #linear>) ->"))


@pytest.mark.parametrize(
    ("present", "instead"),
    [
        ("axis = 1", "axis = 2"),
        ("warp = [[2, 0, 0], [0, 1, 0]", "warp = [[0, 1, 0], [2, 0, 0]"),
        ("warp = [[2, 0, 0], [0, 1, 0]", "warp = [[2, 0, 0], [8, 0, 0]"),
        ("#ttg.linear<", "#ttg.blocked<"),
    ],
    ids=["within-a-warp", "one-dimension-after-the-other", "other-dimensions", "no-reshape"],
)
def test_a_sum_over_other_warps_is_not(present: str, instead: str) -> None:
    assert present in REDUCTION
    assert mistaken(REDUCTION.replace(present, instead)) == []


def test_lanes_that_choose_the_wrong_writer_are_found() -> None:
    good = REDUCTION.replace("[[2, 0, 0], [0, 1, 0]", "[[0, 1, 0], [2, 0, 0]")
    assert mistaken(good.replace("[[0, 0, 4], [0, 0, 8]]", "[[0, 0, 4], [0, 2, 0], [0, 0, 8]]"))
