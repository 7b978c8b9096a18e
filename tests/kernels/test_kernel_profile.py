"""benchmarks/kernel_profile.py: the stage of each launch, and the rows made of ncu's table."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import DEVICE

from nsa.bench.attention import AttentionShape, Inputs, nsa_forward

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernel_profile.py"
PROFILE: dict[str, Any] = runpy.run_path(str(SCRIPT))
Launched = PROFILE["Launched"]
TENSOR = "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active"
TENSOR_CYCLES = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active"
# Of the busiest SM.
TENSOR_MAX = TENSOR_CYCLES.replace("avg", "max")
TABLE = f"""==PROF== Connected to process 7
"ID","Host Name","Kernel Name","Block Size","gpu__time_duration.sum","{TENSOR}","{TENSOR_CYCLES}","{TENSOR_MAX}"
"","","","","ns","%","%","%"
"0","127.0.0.1","score_kernel","(128, 1, 1)","1,000,000","10.0","60.0","95.0"
"1","127.0.0.1","void at::native::fill_kernel(int)","(128, 1, 1)","5,000","0","0","0"
"2","127.0.0.1","select_kernel","(32, 1, 1)","250,000","0","0","0"
"3","127.0.0.1","score_kernel","(128, 1, 1)","3,000,000","10.0","80.0","95.0"
"""
LAUNCHES = [Launched("select_blocks", f"{kernel}_kernel") for kernel in ("score", "select", "score")]


@pytest.mark.slow
def test_each_launch_is_of_its_stage() -> None:
    shape = AttentionShape(1, 200, 4, 2, 16)
    inputs = Inputs.of(shape, torch.float32, DEVICE, 0.0)
    with PROFILE["recorded"]() as launches:
        nsa_forward(inputs, shape.config("triton")).sum().backward()
    ranged = {one.function for one in launches if one.kernel == "ranged_forward_kernel"}
    assert {"compressed_forward", "sliding_forward"} <= ranged
    assert {one.function for one in launches if one.kernel == "score_kernel"} == {"select_blocks"}
    count = len(launches)
    nsa_forward(inputs, shape.config("triton"))
    assert len(launches) == count


def test_launches_of_a_kernel_are_one_row() -> None:
    score, select = PROFILE["profile_rows"](LAUNCHES, PROFILE["counted_launches"](TABLE))
    assert (score["mode"], score["stage"], score["kernel"]) == ("fwd", "select blocks", "score_kernel")
    assert (score["launches"], float(score["ms"]), float(score["tensor_pct"])) == (2, 4.0, 75.0)
    assert (select["kernel"], float(select["ms"])) == ("select_kernel", 0.25)
    # No column of the table is one of the memory's.
    assert score["dram_pct"] == ""


def test_another_order_than_launched_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\b3 launches, .*\b2; .*0 is select_kernel"):
        list(PROFILE["profile_rows"](LAUNCHES[1:], PROFILE["counted_launches"](TABLE)))


@pytest.mark.parametrize("text", ["==ERROR== ERR_NVGPUCTRPERM", TABLE.replace('"ns"', '"us"')], ids=["none", "units"])
def test_a_table_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="gpu__time_duration"):
        PROFILE["counted_launches"](text)


def test_a_file_of_other_columns_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "new" / "ncu.csv"
    PROFILE["check_columns"](out)
    (row, _) = PROFILE["profile_rows"](LAUNCHES, PROFILE["counted_launches"](TABLE))
    assert list(row) == PROFILE["COLUMNS"][: len(row)]
    out.write_text(",".join(PROFILE["COLUMNS"]) + "\n")
    PROFILE["check_columns"](out)
    out.write_text("stage,kernel,ms\n")
    with pytest.raises(ValueError, match="stage,kernel,ms"):
        PROFILE["check_columns"](out)
