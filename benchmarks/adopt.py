"""Put measured rows, and archives of studies, into `benchmarks/results`.

    python benchmarks/adopt.py rows/attention.csv study.tar.gz

A CSV file of `nsa bench` replaces the rows of the same names and shapes in the file of its name; of the host's times,
which are compared between commits, every row stays. The profile, `ncu.csv`, has its own columns and is replaced whole.
Archives also become tables in docs/evaluation.md, and some of their plots its pictures. An archive is what
`benchmarks/study.py --pack` wrote, and replaces the folder of the name of its `--out`; logs and metrics are left out.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import readme

from nsa.bench.compare import latest_rows
from nsa.config import require
from nsa.results import append, read_rows

# Of a study's archive, what is no result.
LEFT_OUT = ("logs", "runs")
PROFILE = "ncu.csv"
# What docs/evaluation.md shows, by study.
PICTURES = {"study": ("curves", "needle"), "study-double": ("needle",), "study-gates": ("needle",)}


def adopt_rows(measured: Path, out: Path) -> None:
    """Put the rows of one CSV file in place of those of the same names and shapes in another."""
    rows = [*(read_rows(out) if out.is_file() else ()), *read_rows(measured)]
    out.unlink(missing_ok=True)
    for row in dict.fromkeys(rows) if rows[0].suite == "host" else latest_rows(rows).values():
        append(out, row)


def adopt(archive: Path, results: Path) -> Path:
    """Write what an archive or a CSV file of rows holds to `results`.

    Returns:
        The folder or the file.

    Raises:
        ValueError: It is no archive of a study, or a name in it leads out of it.
    """
    if archive.suffix == ".csv":
        out = results / archive.name
        if archive.name == PROFILE:
            shutil.copyfile(archive, out)
        else:
            adopt_rows(archive, out)
        return out
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as packed:
            unpack(packed, Path(folder))
        arms = next(Path(folder).glob("*/arms.csv"), None)
        require(arms is not None, "archive", str(archive), "what benchmarks/study.py packed")
        assert arms is not None
        out = results / arms.parent.name
        # Of an earlier study nothing stays: its text and its arms may be others.
        if out.is_dir():
            shutil.rmtree(out)
        shutil.copytree(arms.parent, out, ignore=shutil.ignore_patterns(*LEFT_OUT))
        return out


def unpack(packed: tarfile.TarFile, folder: Path) -> None:
    """The plain files of an archive. `extractall(filter="data")` came with Python 3.11.4."""
    for member in packed:
        path = Path(folder, member.name).resolve()
        require(path.is_relative_to(folder.resolve()), "a name in the archive", member.name, "one inside of it")
        if member.isfile():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(packed.extractfile(member).read())  # type: ignore[union-attr]


def main(argv: Sequence[str] | None = None, root: Path = readme.RESULTS.parents[1]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", nargs="+", type=Path, metavar="ARCHIVE")
    results = root / "benchmarks" / "results" / "h200"
    for archive in parser.parse_args(argv).archives:
        print(f"wrote {adopt(archive, results)}")
    for study, names in PICTURES.items():
        for name in names:
            drawn = results / study / f"{name}.png"
            if drawn.is_file():
                shutil.copyfile(drawn, root / "docs" / f"{study}-{name}.png")
    readme.write(root / "docs" / "evaluation.md", readme.evaluation_tables(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
