"""Runs every kernel of ours under NVIDIA's compute-sanitizer: memory errors, races in shared memory, unwritten reads.

python tests/gpu/sanitize.py [--tools memcheck racecheck initcheck] [--cases "one token"] [--jobs 8]

The exit status is 0 only if each tool reports no error of ours. Torch's own kernels are left out by name, but not from
initcheck, which must see them write what ours read: there what it reports of them is counted and ignored. It does not
see TMA stores, so what ours store so starts from zeros.

Also counted and ignored are races on the state of warp specialization that Triton keeps in shared memory. It is written
before and read after a barrier of all warps, which racecheck misses where every warp reaches it at another instruction.
Such accesses are on the lines of the kernel's `def` and of `gl.warp_specialize`; no access of ours is.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from every_kernel import NAMES

PROGRAM = Path(__file__).resolve().with_name("every_kernel.py")
REPOSITORY = PROGRAM.parents[2]
GLUON = REPOSITORY / "nsa" / "backends" / "gluon"
TOOLS = ("memcheck", "racecheck", "initcheck")
# The exit status where a tool reported something, and the program's last line.
FOUND, END = 9, "the end"
# Triton names a kernel after its function; every one of ours ends so.
OURS = "regex=.*_kernel"
# An allocation of its own for each tensor, so that one step past its end is outside. No CUDA graph is captured so.
ENVIRONMENT = os.environ | {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "NSA_REPLAY": "0",
    "PYTHONPATH": str(REPOSITORY),
}
# A report's line that says where: a function of ours by its plain name, one of torch's with its namespace.
REPORTED = re.compile(r"^=+\s+at (.+)\+0x", re.MULTILINE)
KERNEL = re.compile(r"\w+_kernel")
ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")
# A race is a line for each access; the summary says how many there were.
RACE = re.compile(r"^=+ Error: Race reported between .*\n(?:=+     and .*\n)*", re.MULTILINE)
ACCESS = re.compile(r"access at (\w+)\+\w+ in (\w+\.py):(\d+)")
HAZARDS = re.compile(r"RACECHECK SUMMARY: (\d+) hazard")
# Lines of stacks.
FRAME = re.compile(r"Host Frame|^frame #")


def launch(words: Sequence[str], *options: str) -> subprocess.CompletedProcess[str]:
    command = [*words, sys.executable, str(PROGRAM), *options]
    return subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True)


def on_specialization(race: str) -> bool:
    """Whether a race is on the state of Triton's warp specialization alone."""
    accesses = ACCESS.findall(race)
    for kernel, file, line in accesses:
        path = GLUON / file
        lines = path.read_text().splitlines() if path.is_file() else []
        starts = (f"def {kernel}(", "    gl.warp_specialize(")
        # Triton's kernels may be in a file of the same name.
        if not any(x.startswith(starts[0]) for x in lines) or not lines[int(line) - 1].startswith(starts):
            return False
    return bool(accesses)


def judge(tool: str, output: str, status: int) -> tuple[bool, list[str]]:
    """Whether a tool's output has no error of ours, and what it counts."""
    reported = Counter(REPORTED.findall(output))
    counted = [f"{function}: {times} reports" for function, times in reported.most_common()]
    if END not in output or "Internal Sanitizer Error" in output or status not in (0, FOUND):
        return False, counted
    if tool == "racecheck":
        hazards = sum(map(int, HAZARDS.findall(output)))
        ignored = sum(map(on_specialization, RACE.findall(output)))
        counted += [f"races on the state of warp specialization: {ignored} of {hazards}"]
        return ignored == hazards and status == (FOUND if hazards else 0), counted
    # Ignored is only what is reported of another function, in a report that was printed.
    ignorable = tool == "initcheck" and not any(map(KERNEL.fullmatch, reported))
    errors = sum(map(int, ERRORS.findall(output)))
    return (status == 0 and errors == 0) or (ignorable and errors == reported.total()), counted


def check(tool: str, name: str) -> bool:
    watched = [] if tool == "initcheck" else ["--kernel-name", OURS]
    words = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "10000", *watched]
    done = launch(words, name, *{"racecheck": ["--apart"], "initcheck": ["--zeros"]}.get(tool, []))
    output = done.stdout + done.stderr
    clean, counted = judge(tool, output, done.returncode)
    lines = [line for line in output.splitlines() if line.strip() and not FRAME.search(line)]
    found = f"{tool}, {name}: {'clean' if clean else 'FAILED'}"
    print("\n  ".join([found, *lines[-1 if clean else -40 :], *counted]), flush=True)
    return clean


def main() -> int:
    parser = argparse.ArgumentParser(description="every kernel under compute-sanitizer")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--cases", nargs="+", choices=NAMES, default=list(NAMES), metavar="CASE")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="processes at once")
    arguments = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the path: it comes with the CUDA toolkit")
        return 2
    with ThreadPoolExecutor(arguments.jobs) as pool:
        # Triton's cache is filled first: the tools would each compile the same kernels.
        list(pool.map(lambda name: launch([], name), arguments.cases))
        # Every tool runs on everything, whatever was found before.
        clean = list(pool.map(lambda pair: check(*pair), product(arguments.tools, arguments.cases)))
    print(f"{clean.count(True)} of {len(clean)} runs clean")
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
