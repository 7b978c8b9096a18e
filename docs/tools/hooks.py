"""What mkdocs builds beyond the files of docs/: sections of README.md and CONTRIBUTING.md, the API reference, all rows.

A link to one of those files leads to the page that has its section. A file of the checkout that the site does not have
is named, not linked. The build fails if a page would load anything from the network.
"""

from __future__ import annotations

import ast
import csv
import logging
import posixpath
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
INTRODUCTION = ""


class Excerpt(NamedTuple):
    """A page made of sections of a file, or of the whole file; its title is that of the first one if none is given."""

    source: str
    sections: tuple[str, ...] = ()
    title: str = ""


PAGES = {
    "index.md": Excerpt(
        "README.md",
        (
            INTRODUCTION,
            "Two commands",
            "Quickstart",
            "When it pays",
            "Install",
            "Support matrix",
            "Limitations",
        ),
    ),
    "departures.md": Excerpt("README.md", ("Departures from the paper",)),
    "benchmarks.md": Excerpt("README.md", ("Results",)),
    "extending.md": Excerpt(
        "CONTRIBUTING.md",
        ("How to add a backend", "How to add a hyperparameter of a branch", "How to add a tile or a GPU"),
        "Adding a backend, a hyperparameter, a tile or a GPU",
    ),
    "contributing.md": Excerpt("CONTRIBUTING.md", (INTRODUCTION, "Test", "Commit", "Rules the code keeps", "Glossary")),
    "changelog.md": Excerpt("CHANGELOG.md"),
    "security.md": Excerpt("SECURITY.md"),
}

# Page: its title, and what it describes.
API = {
    "attention": ("Attention", "nsa.NSAConfig nsa.NSAAttention nsa.NSAStats nsa.nsa_attention nsa.explain nsa.Problem"),
    "ops": ("Ops", "nsa.ops"),
    "cache": ("Caches", "nsa.NSACache nsa.PagedNSACache nsa.cache.rows.RowCache"),
    "model": ("Models", "nsa.model.LMConfig nsa.model.LM nsa.model.load_model nsa.model.save_model"),
    "generate": ("Generation", "nsa.generate.generate nsa.generate.generate_text nsa.generation.options.Options"),
    "train": (
        "Training",
        "nsa.train.TrainConfig nsa.train.load_config nsa.train.Trainer nsa.train.TrainStep "
        "nsa.train.run_model.load_run",
    ),
    "data": ("Data", "nsa.data.DataConfig nsa.data.open_loader nsa.data.load_tokenizer nsa.data.recall"),
    "evaluation": (
        "Evaluation and inspection",
        "nsa.evaluation.loss.evaluate_loss nsa.evaluation.recall.evaluate_cells nsa.inspection",
    ),
    "hf": (
        "Transformers",
        "nsa.hf.NSALlamaConfig nsa.hf.NSALlamaForCausalLM nsa.hf.convert.convert_folder nsa.export.export_run",
    ),
    "reference": ("Reference", "nsa.reference"),
}

# What the site shows of a class or module whose other members serve the package itself.
MEMBERS = {
    "nsa.NSAAttention": "new_cache forward",
    "nsa.Problem": "of_config",
    "nsa.NSACache": "load stage commit discard bytes_read_per_step",
    "nsa.PagedNSACache": "page_table free_pages allocate free set_page_table select",
    "nsa.cache.rows.RowCache": "device capacity reset select reorder crop truncate grow to save bytes_used",
    "nsa.model.LM": "compile_layers reset_parameters forward hidden logits blocks head_weight new_cache "
    "parameter_counts flops_per_token flops_by_part mean_keys kv_bytes kv_bytes_per_token kv_bytes_read",
    "nsa.train.Trainer": "train step",
    "nsa.train.TrainStep": "__call__",
    "nsa.data.recall": "Chain make_chains recall_document python_files mixed_documents write_corpus",
    "nsa.hf.NSALlamaConfig": "to_dict attention_config",
    "nsa.hf.NSALlamaForCausalLM": "forward",
}

# Key of a run's config: where its dataclass is.
CONFIGS = {
    "model.attn": ("nsa/config.py", "NSAConfig"),
    "model": ("nsa/model/config.py", "LMConfig"),
    "data": ("nsa/data/config.py", "DataConfig"),
    "": ("nsa/train/config.py", "TrainConfig"),
}

LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)\s]+)\)")
# What a browser fetches by itself: scripts, styles, pictures, fonts; not what a link leads to.
LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*?\ssrc=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?![^>]*canonical)[^>]*?\shref=["']?((?:https?:)?//[^"'\s>]+)|url\(["']?((?:https?:)?//[^"')]+)"""
)


def on_config(config: MkDocsConfig) -> None:
    """A build with --quiet fails: it drops the warnings that `strict` counts, broken links among them."""
    from mkdocs.exceptions import PluginError

    if not logging.getLogger("mkdocs").isEnabledFor(logging.WARNING):
        raise PluginError("mkdocs build --quiet checks no links")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    pages = {name: excerpt_text(excerpt) for name, excerpt in PAGES.items()}
    pages |= {f"api/{name}.md": api_text(title, names.split()) for name, (title, names) in API.items()}
    pages |= {"api/config.md": config_text(), "rows.md": rows_text()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    for asset in ("iframe-worker.js", "site.css"):
        files.append(File.generated(config, asset, abs_src_path=str(Path(__file__).with_name(asset))))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri in PAGES:
        return markdown
    return with_site_links(markdown, f"docs/{page.file.src_uri}")


def on_post_build(config: MkDocsConfig) -> None:
    from mkdocs.exceptions import PluginError

    for path in Path(config.site_dir).rglob("*"):
        if path.suffix in (".html", ".css", ".svg"):
            loaded = [next(filter(None, found)) for found in LOADED.findall(path.read_text())]
            if loaded:
                raise PluginError(f"{path.name} would load {', '.join(loaded)}")


def excerpt_text(excerpt: Excerpt) -> str:
    text = (ROOT / excerpt.source).read_text()
    if excerpt.sections:
        found = sections_of(text)
        text = "\n\n".join(found[name].strip() for name in excerpt.sections)
    if excerpt.title:
        text = f"# {excerpt.title}\n\n{text}"
    elif text.startswith("## "):
        text = text[1:]
    return with_site_links(text, excerpt.source)


def sections_of(text: str) -> dict[str, str]:
    """What is under each heading of the second level, the heading included; `INTRODUCTION` is before the first."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return {INTRODUCTION: parts[0]} | {part.partition("\n")[0][3:].strip(): part for part in parts[1:]}


def with_site_links(text: str, source: str) -> str:
    """Links that are right in the checkout, in the file `source`, as links of the site."""

    def replace(match: re.Match[str]) -> str:
        words, target = match.groups()
        path, _, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source
        page = page_of(file, anchor)
        if page is None:
            return f"`{file}`"
        return f"[{words}]({page}{'#' + anchor if anchor else ''})"

    return LINK.sub(replace, text)


def page_of(file: str, anchor: str) -> str | None:
    """The page of the site with this part of a file, if there is one."""
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    homes = [name for name, excerpt in PAGES.items() if excerpt.source == file]
    for name in homes:
        if anchor in map(anchor_of, PAGES[name].sections):
            return name
    return homes[0] if homes else None


def anchor_of(heading: str) -> str:
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))


def api_text(title: str, names: list[str]) -> str:
    return "\n\n".join([f"# {title}", *map(directive, names)])


def directive(name: str) -> str:
    """What mkdocstrings shows of `name`: its `MEMBERS`, or all that are documented."""
    shown = MEMBERS.get(name)
    return f"::: {name}" if shown is None else f"::: {name}\n    options:\n      members: [{', '.join(shown.split())}]"


def config_text() -> str:
    """The fields of each config as they are written, with their defaults and comments."""
    parts = [
        "# Config keys",
        "The keys of a run's YAML file and of `--set`, group by group. A group's class takes the same names in Python.",
    ]
    for group, (path, name) in CONFIGS.items():
        source = (ROOT / path).read_text()
        (found,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
        fields = [node for node in found.body if isinstance(node, ast.AnnAssign)]
        # From the line after the docstring, which may be a comment.
        lines = source.splitlines()[found.body[0].end_lineno : fields[-1].end_lineno]
        code = textwrap.dedent("\n".join(lines)).strip().replace("noqa: E741  ", "")
        parts += [f"## {f'`{group}`' if group else 'Top level'}: `{name}`", f"```python\n{code}\n```"]
    return "\n\n".join(parts)


# Every row of benchmarks/results with a median time.


def rows_text() -> str:
    """A table for each CSV: one line per shape and mode, one column per implementation."""
    parts = [
        "# All rows",
        "Median milliseconds of every row in `benchmarks/results/`; of rows of the same kind, the last. The files also "
        "have p20 and p80, peak memory, versions and commits.",
        "`nsa bench report` draws them, with break-even lengths, memory, time by branch and shares of the ceilings:",
        "![The page of nsa bench report](bench-report.png)",
    ]
    for path in sorted((ROOT / "benchmarks" / "results").rglob("*.csv")):
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row.get("p50_ms")]
        if rows:
            parts += [f"## {path.parent.name}: {path.stem}", pivot(rows)]
    return "\n\n".join(parts)


def pivot(rows: list[dict[str, str]]) -> str:
    impls = sorted({row["impl"] for row in rows})
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        shape = f"{row['Hq']}/{row['G']}/{row['Dk']}"
        lines.setdefault((row["suite"], row["op"], row["mode"], shape, row["S"], row["B"]), {})[row["impl"]] = row[
            "p50_ms"
        ]
    head = ["suite", "op", "mode", "heads/groups/head_dim", "tokens", "batch", *impls]
    table = [head, ["---"] * len(head)]
    table += [[*key, *(found.get(impl, "") for impl in impls)] for key, found in lines.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)
