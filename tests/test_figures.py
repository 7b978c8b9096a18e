"""Every measured number of README.md and docs/ is computed from a committed results file; a stale one fails here."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path

import pytest

from nsa.bench.compare import files_of_rows
from nsa.bench.plot import rows_digest
from nsa.results import read_rows

ROOT = Path(__file__).parent.parent
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    FIGURES = runpy.run_path(str(ROOT / "benchmarks" / "readme.py"))
    from figures_of_study import longer_study_sentences
PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
# A notebook: what was tried, measured once, and is not in the tree. Where it cites a results file it is compared.
NOTEBOOK = "docs/perf-log.md"
# A number with a unit that only a measurement has.
MEASURED = re.compile(
    r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?: to \d[\d,.]*\d)?"
    r"(?: ?(?:ms|milliseconds?|µs|us|microseconds?|GB|GiB|TB/s|GB/s|TFLOP/s|tokens/s|%)(?![\w/])"
    r"| (?:tokens per second|times (?:as fast|the bytes|at))"
    r"| million tokens|x(?![\w])|(?<=\.\d)M|(?<=\.\d{3})(?![\d.])|(?<=\.\d)k tokens)"
    r"|(?:costs|loss of) \d\.\d+|takes [\d.]+ s(?!\w)|(?:twice|half) as (?:fast|slow)"
)
# Numbers that look measured and are not: defaults, limits and definitions.
DEFINED = {
    "README.md": ("4 GiB of keys and values", "60 % of them of synthetic recall", "1x, dense attention is faster"),
    "docs/evaluation.md": (
        "30 % are in dense",
        "30 % in longer ones",
        "60 % of them of recall documents",
        "as its windows: 60 % of the text",
        "paper's 100 % to 64k",
    ),
    "docs/flash-integration.md": (
        "at least 1.2 times as fast at every",
        "not 1.2 times as fast as that",
        "as 1e-5 of the rows",
    ),
    "docs/kernels.md": (
        "All of `dS` at 64k would be 17 GB",
        "through 1.5 GiB of scratch",
        # Estimates, which the page calls so.
        "forward pass, 2 to 3 milliseconds together",
        "index: about 1 millisecond.",
    ),
    "docs/inference.md": ("64 a step reads 53 % of the bytes of bf16, with 128 52 %",),
    "docs/serving.md": ("fastapi 0.115",),
    "docs/training.md": ("Estimates add 5 µs", "20 % of the peak", "0.5 % for the reference"),
}


def flat(text: str) -> str:
    return " ".join(text.split())


def sentences(page: str) -> list[str]:
    return [flat(text) for text in FIGURES["SENTENCES"].get(page, lambda: ())()]


@pytest.mark.parametrize(("page", "make"), [(page, make) for page, all_ in FIGURES["TABLES"].items() for make in all_])
def test_a_table_is_that_of_the_recorded_rows(page: str, make: object) -> None:
    assert make() in (ROOT / page).read_text()  # type: ignore[operator]


@pytest.mark.parametrize(("page", "text"), [(page, text) for page in FIGURES["SENTENCES"] for text in sentences(page)])
def test_a_sentence_has_the_recorded_numbers(page: str, text: str) -> None:
    assert text in flat((ROOT / page).read_text())


def unsupported_numbers(page: str, text: str) -> list[str]:
    """Measured numbers of a page's prose and tables that no results file gives. Blocks are commands and transcripts."""
    prose = re.sub(r"^```.*?^```$|^ {4,}[^\n]*$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    for make in FIGURES["TABLES"].get(page, ()):
        for line in make().splitlines():
            prose = prose.replace(re.sub(r"`[^`\n]*`", "", line), "")
    prose = flat(prose)
    for known in (*sentences(page), *DEFINED.get(page, ())):
        prose = prose.replace(flat(re.sub(r"`[^`\n]*`", "", known)), "")
    return MEASURED.findall(prose)


@pytest.mark.parametrize("page", [page for page in PAGES if page != NOTEBOOK])
def test_no_page_has_a_number_without_a_results_file(page: str) -> None:
    assert unsupported_numbers(page, (ROOT / page).read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        *("takes 0.31 ms", "is 1.4 to 12 times as fast", "302,773 tokens per second", "| 2.78x |", "at 7.9 GiB"),
        *("reads 1.95 times the bytes", "sees 24.6M tokens", "has a loss of 2.967", "saw 20 million tokens"),
        *("is twice as fast", "costs 0.58", "has a loss of 2.7", "takes 12 s", "pays from 8.3k tokens", "has 17 GB"),
    ],
)
def test_an_unsupported_number_is_found(text: str) -> None:
    assert len(unsupported_numbers("README.md", f"It {text} today.")) == 1
    assert len(unsupported_numbers("README.md", f"    nsa bench host\n\nIt {text} today.")) == 1
    assert unsupported_numbers("README.md", f"    {text}\n") == []


def test_sentences_of_the_longer_study_are_of_its_files(tmp_path: Path) -> None:
    make, study = longer_study_sentences, tmp_path / "study-long"
    assert list(make(study)) == []
    first = ROOT / "benchmarks" / "results" / "h200" / "study"
    shutil.copytree(first, study)
    (study / "arms-plain").mkdir()
    plain = [f"{arm},2048,0,2048,{loss}" for arm, loss in (("nsa", 1.5), ("dense", 1.75))]
    (study / "arms-plain" / "loss.csv").write_text("\n".join(["run,length,begin,end,loss", *plain]))
    made = "\n".join(make(study))
    for part in ("is 3.011, that of NSA 2.722", "1.500 and that of dense attention 1.750", "`nsa-64k` finds 36% at 4k"):
        assert part in made


def test_the_readme_picture_is_that_of_the_recorded_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    FIGURES["draw"](tmp_path / "speedup.svg")
    drawn, shown = (path.read_text() for path in (tmp_path / "speedup.svg", ROOT / "docs" / "speedup.svg"))
    assert lines_of(drawn) == lines_of(shown)


@pytest.mark.parametrize("name", ["attention", "decode", "flash"])
def test_a_plot_of_the_docs_is_that_of_the_recorded_rows(name: str) -> None:
    """Drawn by `nsa bench plot`, or by `nsa bench flash --rows`, which write what identifies the rows into the file."""
    digest = rows_digest(read_rows(ROOT / "benchmarks" / "results" / "h200" / f"{name}.csv"))
    assert digest.encode() in (ROOT / "docs" / f"{name}.png").read_bytes()


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("study*.png")), ids=lambda path: path.stem)
def test_a_plot_of_a_study_is_that_of_its_results(picture: Path) -> None:
    study, _, name = picture.stem.rpartition("-")
    drawn = ROOT / "benchmarks" / "results" / "h200" / study / f"{name}.png"
    assert picture.read_bytes() == drawn.read_bytes()


def test_the_picture_of_the_report_is_that_of_the_recorded_rows() -> None:
    """`docs/tools/pictures.py` writes what identifies the rows into the file."""
    picture = (ROOT / "docs" / "bench-report.png").read_bytes()
    files = files_of_rows([ROOT / "benchmarks" / "results" / "h200"])
    assert rows_digest([row for file in files for row in read_rows(file)]).encode() in picture


def lines_of(svg: str) -> list[str]:
    """The paths of the plotted lines: fonts and versions of matplotlib may differ."""
    return re.findall(r'<path d="([^"]+)" clip-path=', svg)
