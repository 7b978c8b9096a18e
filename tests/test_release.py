"""The sdist and the wheel: what is in them, and that the wheel works where nothing else of the checkout is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import nsa

ROOT = Path(__file__).parent.parent
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "*.egg-info")
BUILD = 'from setuptools import build_meta; build_meta.build_sdist("dist")'


def run(*words: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and "NSA_" not in name}
    done = subprocess.run(list(map(str, words)), cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an sdist and of the wheel that it gives, as `make dist` builds them."""
    tree = tmp_path_factory.mktemp("release") / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=IGNORED)
    run(sys.executable, "-c", BUILD, cwd=tree)
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", "dist", sdist, cwd=tree)
    return tree / "dist"


def files_of(folder: Path) -> set[str]:
    """Every file of the package, also through the link to configs/."""
    return {
        str(Path(parent, name).relative_to(folder.parent))
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
        if not parent.endswith("__pycache__")
    }


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == files_of(ROOT / "nsa")


@pytest.mark.slow
def test_the_sdist_holds_what_tests_and_docs_need(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    parts = [files_of(ROOT / folder) for folder in ("nsa", "configs", "docs", "tests", "benchmarks")]
    files = ("LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "Makefile", "mkdocs.yml")
    assert set(files).union(*parts) <= names


@pytest.mark.slow
def test_the_wheel_works_in_a_clean_environment(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "clean", symlinks=True)
    python = tmp_path / "clean" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)

    # Help needs no other package, not even torch.
    assert "commands:" in run(python, "-m", "nsa", "--help", cwd=tmp_path)
    assert run(tmp_path / "clean" / "bin" / "nsa", "--version", cwd=tmp_path).split() == ["nsa", nsa.__version__]

    # Dependencies are those of this environment: a path in a .pth file, which does not follow an editable install.
    (site,) = (tmp_path / "clean" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    where = run(python, "-c", "import nsa, torch; print(nsa.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path)
    small = "--device cpu --steps 1 --warmup 0 --batch-size 1 --eval-batches 1 --dataset synthetic"
    train = f"train --config tiny --out demo {small} --set sample_tokens=1"
    run(python, "-m", "nsa", *train.split(), cwd=tmp_path)
    assert "<svg" in (tmp_path / "demo" / "report.html").read_text()
    inspect = "inspect demo --prompt import --device cpu -o page.html"
    run(python, "-m", "nsa", *inspect.split(), cwd=tmp_path)
    assert "<style>" in (tmp_path / "page.html").read_text()


def test_every_file_names_the_same_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    latest = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert {project["version"], citation["version"], latest} == {nsa.__version__}
    assert citation["license"] == project["license"]
