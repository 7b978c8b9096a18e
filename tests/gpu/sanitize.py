"""Runs every Triton kernel under NVIDIA's compute-sanitizer: memory errors, races in shared memory, unwritten reads.

python tests/gpu/sanitize.py [--tools memcheck racecheck initcheck]

The exit status is 0 only if each tool reports no error. The tool watches the kernels of this library alone: torch's own
are left out by name.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck")
PROGRAM = Path(__file__).resolve().with_name("every_kernel.py")
REPOSITORY = PROGRAM.parent.parent.parent
# Triton names a kernel after its function; every one of ours ends so.
OURS = "regex=.*_kernel"
# An allocation of its own for each tensor, so that one step past its end is outside.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def check(tool: str) -> bool:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--kernel-name", OURS]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*command, sys.executable, str(PROGRAM)], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    shown = lines if done.returncode else lines[-3:]
    print(f"{tool}: {'clean' if done.returncode == 0 else 'FAILED'}", *shown[-40:], sep="\n  ", flush=True)
    return done.returncode == 0


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
