"""The decode kernels compile for an H200, fit its shared memory, and reduce over the warps that they should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

pytest.importorskip("triton", reason="the kernels need Triton")

import sass
from compiling import TARGETS, Compiled
from gluon_compiling import Loop, hazards, read

from nsa.backends import gluon

HERE = Path(__file__).parent
FORMS = ("64/4/128x1", "64/4/128x1 paged", "64/4/128x1 paged fp8")
PINNED = ("64/4/128x1 cmp", "64/4/128x1 sel", "64/4/128x1 win")
DENSE = ("12/2/64x1 dense", "64/4/128x8 dense")
# The sines' reduction of large angles, which is not taken, has an array of its own in memory.
TRIGONOMETRIC = {"append_kernel", "mean_kernel", "outer_kernel"}


def compiled(folder: Path, *options: str) -> list[Compiled]:
    out = folder / "kernels.json"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "compile_decode.py"), "--target", "sm_90", *options]
    path = os.pathsep.join([str(HERE.parent.parent), environment.get("PYTHONPATH", "")])
    subprocess.run(
        [*command, "--out", str(out)], check=True, env={**environment, "PYTHONPATH": path}, timeout=PATIENCE_S
    )
    return [Compiled(**kernel) for kernel in json.loads(out.read_text())]


@pytest.mark.slow
def test_every_launch_of_a_step_compiles_and_fits(tmp_path: Path) -> None:
    """One test: workers that share its parts would each compile all kernels."""
    found = compiled(tmp_path, "--steps", *FORMS, *PINNED, *DENSE)
    assert {x.kernel: x.error for x in found if x.error} == {}
    of_attention = [x for x in found if x.kernel != "linear_kernel"]
    # Seven with an MLP, and the mean in the place of its two.
    assert sum(x.shape == FORMS[0] for x in of_attention) == 8
    # Projections, the gate, SwiGLU, and an output with a residual.
    assert sum((x.shape, x.kernel) == (FORMS[0], "linear_kernel") for x in found) == 4
    # What a form does not change is compiled once.
    for form in FORMS[1:]:
        changed = {x.kernel for x in found if x.shape == form}
        assert {"append_kernel", "outer_kernel", "compressed_split_kernel", "near_kernel"} <= changed
    assert {x.shape for x in found} == {*FORMS, *PINNED, *DENSE}
    for step in DENSE:
        kernels = [x.kernel for x in of_attention if x.shape == step]
        assert kernels == ["append_kernel", "compressed_split_kernel", "merge_kernel"]
    for x in found:
        assert x.shared <= TARGETS["sm_90"].shared, x.kernel
        assert x.spills <= (16 if x.kernel in TRIGONOMETRIC or "fp8" in x.shape else 0), x.kernel
    # No reduction mistakes its warps.
    assert {x.kernel: x.mistaken for x in found if x.mistaken} == {}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_86", "sm_90"])
def test_linear_layers_of_the_most_rows_fit(target: str, tmp_path: Path) -> None:
    """A step has taken its tokens in when the last of them are launched: it could not be run another way."""
    found = compiled(tmp_path, "--target", target, "--steps", "12/2/64x16 linear")
    assert [(x.kernel, x.error) for x in found] == [("linear_kernel", "")] * 4
    assert [x.shared for x in found if x.shared > TARGETS[target].shared] == []


@pytest.mark.slow
@pytest.mark.skipif(gluon.import_failure() is not None, reason=str(gluon.import_failure()))
def test_ctas_that_stay_fit_twice_on_an_sm(tmp_path: Path) -> None:
    found = compiled(tmp_path, "--gluon", "--steps", "64/4/128x1", "64/4/128x4", "64/4/128x4 paged")
    assert {x.kernel: x.error for x in found if x.error} == {}
    # Tiles of 16 rows and paged caches stay with Triton.
    assert [x.shape for x in found] == ["64/4/128x4"]
    x = found[0]
    assert 2 * (x.shared + 1024) <= TARGETS["sm_90"].shared + 1024
    assert 2 * 32 * x.warps * x.registers <= 65536
    assert (x.spills, x.overwritten, x.mistaken) == (0, [], [])
    # One tile after the other: what is pooled is summed while the values are multiplied.
    (loop,) = read(x.code)
    assert loop == Loop(["product", "wait 0", "exp", "product", "wait 0"], loop.sums, 0, [])
    assert loop.sums[0] == 0
    assert loop.sums[1] >= 32
    assert hazards(sass.instructions(x.code)) == []
    # Without its waits the same code would be wrong.
    waiting = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    assert waiting in x.code
    unguarded = x.code.replace(waiting, waiting.replace("0x0", "0x2"))
    assert hazards(sass.instructions(unguarded))
    assert read(unguarded)[0].hazards
