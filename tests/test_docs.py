"""What README.md and docs/ say agrees with the code and with the recorded rows."""

from __future__ import annotations

import argparse
import json
import pkgutil
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from statistics import median

import pytest
from docs_pages import PAGES, README, ROOT, Line, parse_line, shell_lines, snippets

from nsa import settings
from nsa.cli import COMMANDS, parser_of
from nsa.train.config import TrainConfig, load_config
from nsa.train.keys import keys_of, replacement

KEYS = set(keys_of(TrainConfig))
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@cache
def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return nested[0].choices if nested else {}


def shown_lines(page: Path) -> list[Line]:
    text = page.read_text()
    return [*shell_lines(text), *filter(None, map(parse_line, snippets(text)))]


@by_page
def test_every_command_shown_exists_and_has_its_flags(page: Path) -> None:
    """Also in a sentence, where it may have words such as FILE; those of blocks run in tests/test_docs_run.py."""
    for name, *words in filter(None, (line.command for line in shown_lines(page))):
        assert name in COMMANDS, words
        parser: argparse.ArgumentParser = parser_of(name)
        if subparsers(parser) and words:
            assert words[0] in subparsers(parser), words
            parser = subparsers(parser)[words[0]]
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert flags <= parser._option_string_actions.keys(), words


@by_page
def test_every_make_target_and_script_shown_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in shown_lines(page):
        program, *words = line.programs[-1]
        if program == "make":
            assert words[0] in targets, line.text
        if program == "python" and words[0].endswith(".py"):
            script = (ROOT / words[0]).read_text()
            assert all(f'"{word}"' in script for word in words if word.startswith("--")), line.text


@by_page
def test_every_link_and_path_exists(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")]
    paths = re.findall(r"(?<![\w/.<])(?:nsa|docs|tests|benchmarks|configs)/[\w/.-]*[\w/]", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "flash-integration.md"], ids=lambda page: page.name
)
def test_no_commit_is_named_in_prose(page: Path) -> None:
    assert not re.findall(r"\b(?=[a-f\d]*\d)(?=[a-f\d]*[a-f])[a-f\d]{7}\b", page.read_text())


def test_the_figures_are_drawn_from_the_reference() -> None:
    figures = runpy.run_path(str(ROOT / "docs/tools/figures.py"))["figures"]()
    for name, text in figures.items():
        assert (ROOT / "docs/figures" / name).read_text() == text, "python docs/tools/figures.py"


def test_the_site_finds_the_sections_and_names_it_shows() -> None:
    """`make docs` builds it; this takes no mkdocs."""
    site = runpy.run_path(str(ROOT / "docs/tools/hooks.py"))
    for excerpt in site["PAGES"].values():
        assert site["excerpt_text"](excerpt).startswith("# ")
    assert "NSAConfig" in site["config_text"]()
    assert "nsa-triton-graphs" in site["rows_text"]()
    # But what needs transformers, which takes seconds to import.
    for name in " ".join(names for page, (_, names) in site["API"].items() if page != "hf").split():
        assert pkgutil.resolve_name(name).__doc__, name


# Numbers.


def test_the_readme_tables_are_those_of_the_recorded_rows() -> None:
    tables = run_script().strip().split("\n\n")
    assert len(tables) == 4
    for table in tables:
        assert table in README.read_text()


def test_the_readme_picture_is_drawn_from_the_recorded_rows(tmp_path: Path) -> None:
    run_script("--plot", str(tmp_path / "speedup.svg"))
    assert "<svg" in (tmp_path / "speedup.svg").read_text()


def run_script(*words: str) -> str:
    script = str(ROOT / "benchmarks" / "readme.py")
    return subprocess.run([sys.executable, script, *words], capture_output=True, text=True, check=True).stdout


def test_the_readme_figures_of_the_recorded_run_agree() -> None:
    lines = (ROOT / "benchmarks/results/h200/run-1000-steps.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    rate = median(record["tokens_per_s"] for record in records if record["kind"] == "heartbeat" and "mfu" in record)
    end = records[-1]
    text = README.read_text()
    assert f"from {end['loss_start']:.2f} to {end['loss_end']:.2f}" in text
    assert f"{rate:,.0f} tokens per second" in " ".join(text.split())
    assert records[0]["command"] in text
    assert end["skipped"] == 0
    assert end["fallbacks"] == {}


@pytest.mark.parametrize(
    ("suite", "impl", "column", "form"),
    [
        ("train", "nsa-triton-compiled", "tokens_per_s", "{:,.0f} tokens per second"),
        ("train", "nsa-sdpa-graphs", "tokens_per_s", "{:,.0f}"),
        ("host", "nsa-auto", "p50_ms", "{:.2f} ms"),
    ],
)
def test_a_readme_figure_is_in_a_row(suite: str, impl: str, column: str, form: str) -> None:
    rows = recorded(suite)
    values = [float(row[column]) for row in rows if row["impl"] == impl and row["S"] == "2048"]
    # Rows are appended: the last is the newest.
    assert form.format(values[-1]) in README.read_text()


def test_the_fp8_table_is_that_of_the_recorded_rows() -> None:
    text = (ROOT / "docs" / "inference.md").read_text()
    for row in recorded("fp8_cache", machine="cpu"):
        error = float(row["logit_rms_error"]) / float(row["logit_std"])
        cells = [row["model"], row["dtype"], row["cache"], f"{error:.2%}", f"{float(row['kl']):.1e}"]
        cells += [f"{float(row['same_top_token']):.1%}", f"{float(row['loss']):.3f}"]
        assert f"| {' | '.join(cells)} | {float(row['same_selected_blocks']):.1%} |" in text


def recorded(suite: str, machine: str = "h200") -> list[dict[str, str]]:
    head, *lines = (ROOT / f"benchmarks/results/{machine}/{suite}.csv").read_text().splitlines()
    return [dict(zip(head.split(","), line.split(","), strict=True)) for line in lines]


# Migration.

MIGRATION = ROOT / "docs" / "migration.md"


def test_the_migration_page_has_every_environment_name() -> None:
    text = MIGRATION.read_text()
    names = {*settings.BY_ENV, *settings.RETIRED}
    assert names <= set(re.findall(r"`(NSA_[A-Z\d_]+)`", text))


def test_the_migration_page_has_the_keys_that_errors_name() -> None:
    rows = re.findall(r"^\| (`.+?`) \| (.+) \|$", section(MIGRATION, "Config keys"), re.MULTILINE)
    found = [(old, re.findall(r"`([\w.]+)`", now)) for olds, now in rows for old in re.findall(r"`([\w.]+)`", olds)]
    assert len(found) > 40
    for old, now in found:
        if old in KEYS:
            assert now[0] == old
        else:
            said = set(replacement(old, KEYS).replace(",", " ").split())
            # The same name, for a row that says so.
            assert said & {*now, old.rpartition(".")[2], f"model.attn.{old.rpartition('.')[2]}"}, old


def test_the_config_of_the_migration_page_loads(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```yaml$(.*?)^```$", MIGRATION.read_text(), re.MULTILINE | re.DOTALL)
    file = tmp_path / "run.yaml"
    file.write_text(block)
    config = load_config(file, {"device": "cpu"}, env=settings.Settings())
    assert config.tokens_per_batch * config.accum * config.steps == 50_000 * 2 * 2048


def section(page: Path, title: str) -> str:
    return page.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
