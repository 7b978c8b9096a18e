"""Runs every kernel of ours under NVIDIA's compute-sanitizer: memory errors, races in shared memory, unwritten reads.

python tests/gpu/sanitize.py [--tools memcheck racecheck initcheck]

The exit status is 0 only if each tool reports no error of ours. Torch's own kernels are left out by name, but not from
initcheck, which must see them write what ours read: there what they are accused of themselves is counted and let pass.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck")
PROGRAM = Path(__file__).resolve().with_name("every_kernel.py")
REPOSITORY = PROGRAM.parent.parent.parent
# Triton names a kernel after its function; every one of ours ends so.
OURS = "regex=.*_kernel"
# An allocation of its own for each tensor, so that one step past its end is outside. No CUDA graph is captured so.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "NSA_REPLAY": "0"}


# A report's line that says where: a function of ours by its plain name, one of torch's with its namespace.
ACCUSED = re.compile(r"^=+\s+at (\w+_kernel)\b", re.MULTILINE)


def check(tool: str) -> bool:
    watched = [] if tool == "initcheck" else ["--kernel-name", OURS]
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "10000", *watched]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*command, sys.executable, str(PROGRAM)], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    accused = Counter(ACCUSED.findall(said))
    clean = not accused and (done.returncode == 0 or (tool == "initcheck" and done.returncode == 9))
    lines = [line for line in said.splitlines() if line.strip() and "Host Frame" not in line]
    print(f"{tool}: {'clean' if clean else 'FAILED'}", *lines[-3 if clean else -40 :], sep="\n  ", flush=True)
    for kernel, times in accused.most_common():
        print(f"  {kernel}: {times} reports")
    return clean


def main() -> int:
    parser = argparse.ArgumentParser(description="every kernel under compute-sanitizer")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    arguments = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the path: it comes with the CUDA toolkit")
        return 2
    # Every tool runs, whatever the one before it found.
    clean = [check(tool) for tool in arguments.tools]
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
