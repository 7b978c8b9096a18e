"""What bounds each kernel of the attention: Nsight Compute's counters of one forward and one backward pass.

python benchmarks/kernel_profile.py --heads 64/4/128 --lengths 8192 65536 --out ncu.csv

One row per pass, stage and kernel: launches, their milliseconds together, and how busy each unit was, in percent of its
peak, weighted by time. A profiled backward pass runs its branches one after the other. `ncu` replays each launch for
several counters with caches emptied before, so the milliseconds are more than in a benchmark; their shares count.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nsa.backends.stages import Stage
from nsa.backends.triton.launch import Launch
from nsa.bench.attention import AttentionShape, Inputs, nsa_forward, parse_heads
from nsa.config import require
from nsa.results import origin_columns

# The columns of each unit, averaged over the SMs; where ncu has several, as for the tensor cores, the busiest counts.
UNITS = {
    "tensor": r"sm__(inst_executed_)?pipe_tensor.*\.avg\.pct_of_peak_sustained_active",
    "exp": r"sm__(inst_executed_)?pipe_xu.*\.avg\.pct_of_peak_sustained_active",
    "alu": r"sm__(inst_executed_)?pipe_alu.*\.avg\.pct_of_peak_sustained_active",
    "issue": r"sm__inst_issued\.avg\.pct_of_peak_sustained_active",
    "l1": r"l1tex__throughput\.avg\.pct_of_peak_sustained_active",
    "l2": r"lts__throughput\.avg\.pct_of_peak_sustained_elapsed",
    "dram": r"gpu__dram_throughput\.avg\.pct_of_peak_sustained_elapsed",
}
DURATION = "gpu__time_duration.sum"
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis")
COLUMNS = ["mode", "stage", "kernel", "launches", "ms", *(f"{unit}_pct" for unit in UNITS)]
COLUMNS += ["B", "S", "Hq", "G", "Dk", "Dv", "dtype", "gpu", "torch", "triton", "commit", "date"]


class Launched(NamedTuple):
    """One launch: the function of the backend that made it, as `compressed_forward`, and the kernel."""

    function: str
    kernel: str


class Counted(NamedTuple):
    """What ncu counted of one launch; a unit for which it has no column is not in `busy`."""

    kernel: str
    ms: float
    busy: dict[str, float]


def stage_function() -> str:
    """The function of the backend that is running, from the frames of this call."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        given = frame.f_locals
        if frame.f_code.co_name == "run_together":
            return str(given["function"])
        if frame.f_code.co_name == "__call__" and isinstance(given.get("self"), Stage):
            return str(given["self"].function)
        frame = frame.f_back
    raise RuntimeError("a kernel was launched outside of a stage")


@contextmanager
def recorded() -> Iterator[list[Launched]]:
    """The launches of this process from here on."""
    launches: list[Launched] = []

    def record(self: Launch, **free: Any) -> None:
        launches.append(Launched(stage_function(), self.kernel.fn.__name__))
        call(self, **free)

    call = Launch.__call__
    Launch.__call__ = record
    try:
        yield launches
    finally:
        Launch.__call__ = call


def worker(shape: AttentionShape, out: Path) -> None:
    """One forward and backward pass for ncu to count, and a list of its launches in `out`."""
    inputs = Inputs.of(shape, torch.bfloat16, "cuda", 0.0)
    forward = partial(nsa_forward, inputs, shape.config("triton"))
    do = torch.randn_like(inputs.q)
    # Switches the library to what it does in a profile.
    with torch.autograd.profiler.emit_nvtx():
        for _ in range(2):
            forward().backward(do)
        torch.cuda.synchronize()
        with recorded() as launches:
            torch.cuda.profiler.start()
            forward().backward(do)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
    out.write_text(json.dumps(launches))


def counted_launches(text: str) -> list[Counted]:
    """Of what ncu prints: lines of its own, then a table whose second row holds units."""
    rows = csv.DictReader(line for line in text.splitlines() if line.startswith('"'))
    units = next(rows, {})
    if units.get(DURATION) not in ("ns", "nsecond"):
        raise ValueError(f"no table with {DURATION} in nanoseconds, but {units.get(DURATION)}")
    found = []
    for row in rows:
        busy = {}
        for unit, pattern in UNITS.items():
            columns = [number(x) for name, x in row.items() if x and re.fullmatch(pattern, name)]
            if columns:
                busy[unit] = max(columns)
        found.append(Counted(row["Kernel Name"].split("(")[0], number(row[DURATION]) / 1e6, busy))
    return found


def number(text: str) -> float:
    return float(text.replace(",", ""))


def profile_rows(launches: list[Launched], counted: list[Counted]) -> Iterator[dict[str, Any]]:
    """Rows by pass, stage and kernel, in the order of their first launches; without torch's own kernels."""
    ours = {launched.kernel for launched in launches}
    counted = [one for one in counted if one.kernel in ours]
    if [one.kernel for one in counted] != [one.kernel for one in launches]:
        pairs = enumerate(zip((x.kernel for x in launches), (x.kernel for x in counted), strict=False))
        other = next((f"; launch {i} is {a}, and counted {b}" for i, (a, b) in pairs if a != b), "")
        raise ValueError(f"ncu counted {len(counted)} launches, but there were {len(launches)}{other}")
    groups: dict[Launched, list[Counted]] = {}
    for launched, one in zip(launches, counted, strict=True):
        groups.setdefault(launched, []).append(one)
    for (function, kernel), ones in groups.items():
        total = sum(one.ms for one in ones)
        known = [unit for unit in UNITS if all(unit in one.busy for one in ones)]
        busy = {unit: sum(one.ms * one.busy[unit] for one in ones) / total for unit in known}
        mode = "bwd" if function.endswith("backward") else "fwd"
        yield {
            "mode": mode,
            "stage": function.replace("_", " "),
            "kernel": kernel,
            "launches": len(ones),
            "ms": f"{total:.4f}",
            **{f"{unit}_pct": f"{busy[unit]:.1f}" if unit in busy else "" for unit in UNITS},
        }


def profile(shape: AttentionShape, words: list[str], out: Path) -> list[dict[str, Any]]:
    """Run a worker under ncu; `words` tell it the shape. What ncu printed is kept beside `out` if it cannot be read."""
    with tempfile.TemporaryDirectory() as folder:
        log, launches = Path(folder) / "ncu.log", Path(folder) / "launches.json"
        command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
        command += ["--profile-from-start", "off", "--kernel-name", "regex:_kernel", "--log-file", str(log)]
        command += [word for section in SECTIONS for word in ("--section", section)]
        # A replayed CUDA graph would not launch its kernels one by one.
        environment = os.environ | {"NSA_REPLAY": "0"}
        done = subprocess.run([*command, sys.executable, __file__, *words, "--worker", str(launches)], env=environment)
        text = log.read_text() if log.is_file() else ""
        if done.returncode != 0 or not launches.is_file():
            raise SystemExit(f"ncu ended with {done.returncode} at {shape}:\n{text[-2000:]}")
        try:
            counted = counted_launches(text)
            rows = list(profile_rows([Launched(*one) for one in json.loads(launches.read_text())], counted))
        except ValueError as error:
            kept = shutil.copy(log, out.with_suffix(".log"))
            raise SystemExit(f"{shape}: {error}; what ncu printed is in {kept}") from error
        missing = UNITS.keys() - counted[0].busy.keys()
        if missing:
            header = next(line for line in text.splitlines() if line.startswith('"'))
            print(f"ncu has no column for {', '.join(sorted(missing))} in {header}", file=sys.stderr)
        return rows


def check_columns(path: Path) -> None:
    """That rows can be appended to the file at `path`, which need not exist; before the GPU's time is spent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = path.read_text().partition("\n")[0] if path.is_file() else ""
    require(header in ("", ",".join(COLUMNS)), str(path), header, f"the columns {','.join(COLUMNS)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=["64/4/128"], help="heads/groups/head_dim")
    parser.add_argument("--lengths", nargs="+", type=int, default=[65536])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("ncu.csv"), help="rows are appended")
    parser.add_argument("--commit", help="the commit to record")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available() or shutil.which("ncu") is None:
        print("this needs a CUDA GPU, and ncu on the path: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    shapes = {
        (heads, length): AttentionShape(args.batch_size, length, *parse_heads(heads))
        for heads in args.heads
        for length in args.lengths
    }
    if args.worker is not None:
        worker(*shapes.values(), args.worker)
        return 0
    check_columns(args.out)
    for (heads, length), shape in shapes.items():
        words = ["--heads", heads, "--lengths", str(length), "--batch-size", str(args.batch_size)]
        rows = profile(shape, words, args.out)
        origin = {"dtype": "bfloat16", **origin_columns(torch.device("cuda"), args.commit)}
        new = not args.out.is_file()
        with args.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows({**row, **shape.columns, **origin} for row in rows)
        print(f"{shape}: {len(rows)} kernels, {sum(float(row['ms']) for row in rows):.2f} ms", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
