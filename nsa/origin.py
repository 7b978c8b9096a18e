"""Provenance of results: the commit of the code, installed versions, and the folder of configs."""

from __future__ import annotations

import subprocess
from pathlib import Path


def package_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    # Slow to import, and not needed for a command's help.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the checkout that this package is in, with `+` if files differ from it; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    try:
        outputs = [
            subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return outputs[0] + ("+" if outputs[1] else "")


def configs_folder() -> Path:
    """The folder `configs/`: in the package when installed from a wheel, next to it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"
