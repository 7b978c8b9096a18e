"""What README.md and docs/ say agrees with the code and with the recorded rows."""

from __future__ import annotations

import argparse
import pkgutil
import re
import runpy
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
from docs_pages import PAGES, ROOT, Line, parse_line, shell_lines, snippets

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


# Words of the glossary's last column that are right in other senses, such as the parts of a file.
OTHER_SENSES = {"chosen", "choice", "look", "mixture", "packed rows", "parts", "path", "plain", "preference"}
OTHER_SENSES |= {"processor", "product", "program", "record", "server", "width"}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_pages_keep_to_the_glossary(page: Path) -> None:
    glossary = (ROOT / "CONTRIBUTING.md").read_text().partition("## Glossary")[2]
    avoided = {word for row in re.findall(r"\| ([^|\n]+) \|$", glossary, re.MULTILINE) for word in row.split(", ")}
    avoided -= OTHER_SENSES | {"not", "---"}
    assert len(avoided) > 8
    text = " ".join(re.sub(r"`[^`\n]*`", "", page.read_text()).lower().split())
    assert [word for word in sorted(avoided) if word in text] == []


def test_every_test_of_the_robustness_page_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "robustness.md").read_text())
    assert named
    defined = {path: re.findall(r"^def (test_\w+)", (ROOT / path).read_text(), re.MULTILINE) for path, _ in named}
    assert not [f"{path}::{name}" for path, name in named if name not in defined[path]]


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
    shown = {
        name for excerpt in site["PAGES"].values() if excerpt.source == "CONTRIBUTING.md" for name in excerpt.sections
    }
    assert shown == set(site["sections_of"]((ROOT / "CONTRIBUTING.md").read_text()))
    assert "NSAConfig" in site["config_text"]()
    assert "nsa-triton-graphs" in site["rows_text"]()
    # But what needs transformers, which takes seconds to import.
    for name in " ".join(names for page, (_, names) in site["API"].items() if page != "hf").split():
        assert pkgutil.resolve_name(name).__doc__, name


def test_the_map_of_the_architecture_page_has_every_module() -> None:
    """Of the package itself, the ops and the backends; `ranged*.py` stands for several."""
    text = section(ROOT / "docs" / "architecture.md", "The map")
    listed = {name.strip("/") for name in re.findall(r"[\w*]+(?:\.py|/)", text)}
    folders = [ROOT / "nsa" / name for name in ("", "ops", "backends", "backends/triton", "backends/gluon")]
    modules = [path.name for folder in folders for path in folder.glob("[a-z]*.py")]
    packages = [path.parent.name for folder in folders for path in folder.glob("*/__init__.py")]
    assert [name for name in modules + packages if not any(fnmatch(name, pattern) for pattern in listed)] == []


def test_the_kernels_page_names_every_kernel() -> None:
    sources = [path.read_text() for path in (ROOT / "nsa" / "backends").rglob("*.py")]
    kernels = {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)}
    assert len(kernels) > 30
    assert kernels - set(re.findall(r"`(\w+)`", (ROOT / "docs" / "kernels.md").read_text())) == set()


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
