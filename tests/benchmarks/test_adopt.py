"""Archives of studies become results files, and tables of docs/evaluation.md."""

from __future__ import annotations

import csv
import importlib
import shutil
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from bench_rows import ROW

from nsa.results import append, read_rows

ROOT = Path(__file__).parents[2]
MODULES = ("adopt", "readme", "recorded", "figures_of_kernels", "figures_of_study", "study", "arms", "jobs")


@pytest.fixture(scope="module")
def adopt() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("adopt")
    sys.path.remove(str(ROOT / "benchmarks"))
    for name in MODULES:
        sys.modules.pop(name, None)


def packed(folder: Path) -> Path:
    with tarfile.open(folder.with_suffix(".tar.gz"), "w:gz") as archive:
        archive.add(folder, folder.name)
    return folder.with_suffix(".tar.gz")


@pytest.fixture
def study_archive(tmp_path: Path) -> Path:
    out = tmp_path / "study"
    (out / "logs").mkdir(parents=True)
    (out / "logs" / "nsa.log").write_text("of no use\n")
    arms = ["arm,seq_len,parameters,tokens,loss,tokens_per_s", "dense,8192,26000000,24576000,3.25,"]
    (out / "arms.csv").write_text("\n".join([*arms, "nsa,8192,26100000,24576000,3.125,1000000.0"]) + "\n")
    cells = [("needle", 0.0, 1), ("needle", 1.0, 0), ("needle", 0.5, 1), ("needle", 0.25, 1)]
    with (out / "needle.csv").open("w") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["run", "task", "length", "value", "accuracy"])
        rows.writerows(["nsa-64k", task, 65536, value, accuracy] for task, value, accuracy in cells)
    plain = out / "arms-plain" / "loss.csv"
    plain.parent.mkdir()
    plain.write_text("run,length,begin,end,loss\nnsa,8192,0,8192,2.5\nnsa,8192,0,1,4.0\n")
    (out / "curves.png").write_bytes(b"curves")
    return packed(out)


def test_tables_are_written_once(adopt: ModuleType, study_archive: Path, tmp_path: Path) -> None:
    results, page = tmp_path / "benchmarks" / "results" / "h200", tmp_path / "docs" / "evaluation.md"
    for folder in (results, page.parent):
        folder.mkdir(parents=True)
    page.write_text("# Evaluation\n\nText.\n")
    earlier = results / "study" / "arms" / "sliding.json"
    earlier.parent.mkdir(parents=True)
    earlier.touch()
    for _ in range(2):
        assert adopt.main([str(study_archive)], tmp_path) == 0
        heading, text, *tables = page.read_text().split("\n\n")
        assert (heading, text) == ("# Evaluation", "Text.")
        arms, needles = (table.strip().split("\n") for table in tables)
        assert arms[2:] == [
            "| 8k | `nsa` | 26.1M | 24.6M | 3.125 | 2.500 | 1,000,000 |",
            "| 8k | `dense` | 26.0M | 24.6M | 3.250 |  |  |",
        ]
        assert needles[2:] == ["| `nsa-64k` | needle | 75% |"]
    assert not (results / "study" / "logs").exists()
    assert not earlier.exists()
    assert (page.parent / "study-curves.png").read_bytes() == b"curves"


def test_another_study_has_a_folder_and_tables_of_its_own(
    adopt: ModuleType, study_archive: Path, tmp_path: Path
) -> None:
    results, page = tmp_path / "benchmarks" / "results" / "h200", tmp_path / "docs" / "evaluation.md"
    for folder in (results, page.parent):
        folder.mkdir(parents=True)
    page.write_text("# Evaluation\n")
    longer = study_archive.parent / "study-long"
    shutil.copytree(study_archive.parent / "study", longer)
    assert adopt.main([str(study_archive), str(packed(longer))], tmp_path) == 0
    assert {path.parent.name for path in results.glob("*/arms.csv")} == {"study", "study-long"}
    heads = [part.split("\n")[0].split("|")[1].strip() for part in page.read_text().split("\n\n")[1:]]
    assert heads == ["context", "after the extension", "context, long study", "after the extension, long study"]


def test_new_rows_replace_those_of_the_same_shape(adopt: ModuleType, tmp_path: Path) -> None:
    measured, kept = tmp_path / "attention.csv", tmp_path / "results" / "attention.csv"
    for path, length, ms in ((kept, 64, 3.0), (kept, 128, 5.0), (measured, 128, 4.0), (measured, 256, 9.0)):
        append(path, replace(ROW, S=length, p50_ms=ms))
    assert adopt.adopt(measured, kept.parent) == kept
    assert [(row.S, row.p50_ms) for row in read_rows(kept)] == [(64, 3.0), (128, 4.0), (256, 9.0)]
    with pytest.raises(FileNotFoundError):
        adopt.adopt(tmp_path / "absent.csv", kept.parent)


def test_a_profile_is_replaced_whole(adopt: ModuleType, tmp_path: Path) -> None:
    measured, kept = tmp_path / "ncu.csv", tmp_path / "results" / "ncu.csv"
    kept.parent.mkdir()
    for path, line in ((kept, "stage,ms\nold,1.0\n"), (measured, "mode,stage,ms\nfwd,new,2.0\n")):
        path.write_text(line)
    assert adopt.adopt(measured, kept.parent) == kept
    assert kept.read_text() == measured.read_text()


def test_rows_of_the_host_stay_by_commit(adopt: ModuleType, tmp_path: Path) -> None:
    measured, kept = tmp_path / "host.csv", tmp_path / "results" / "host.csv"
    append(kept, replace(ROW, suite="host", commit="before"))
    append(measured, replace(ROW, suite="host", commit="after"))
    adopt.adopt(measured, kept.parent)
    assert [row.commit for row in read_rows(kept)] == ["before", "after"]


def test_another_archive_is_refused(adopt: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="archive is"):
        adopt.adopt(packed(tmp_path / "other"), tmp_path)


def test_a_name_that_leads_out_of_the_archive_is_refused(adopt: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "arms.csv").write_text("arm\n")
    archive = tmp_path / "bad.tar.gz"
    with tarfile.open(archive, "w:gz") as made:
        made.add(tmp_path / "arms.csv", "../arms.csv")
    with pytest.raises(ValueError, match=r"'\.\./arms\.csv'"):
        adopt.adopt(archive, tmp_path / "results")
