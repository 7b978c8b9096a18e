"""Where a result comes from: the commit of the code, its configs and the versions of what it stands on."""

from __future__ import annotations

import subprocess
from pathlib import Path


def installed(package: str) -> str | None:
    # Slow to import, and a command's help does not need it.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The checkout this package is in, `+` when files differ from it; None outside one."""
    folder = Path(__file__).resolve().parent
    try:
        answers = [
            subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return answers[0] + ("+" if answers[1] else "")


def configs_folder() -> Path:
    """`configs/`: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"
