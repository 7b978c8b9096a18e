"""The pictures of pages in docs/, taken by Debian's Chromium through Playwright.

    apt-get install chromium && pip install '.[browser]'
    python docs/tools/pictures.py runs/demo

The run is that of `make demo`; the inspector's text is `nsa/attention.py`, and the benchmarks are the recorded ones.
"""

from __future__ import annotations

import shutil
import struct
import sys
import tempfile
import zlib
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import Page, sync_playwright

from nsa.bench.compare import files_of_rows
from nsa.bench.plot import rows_digest
from nsa.cli import main
from nsa.results import read_rows

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
# Signature and IHDR.
PNG_HEADER = 33


class Picture(NamedTuple):
    """What a window of `size` shows of a page."""

    name: str
    page: str
    size: tuple[int, int]
    scheme: str = "light"


PICTURES = (
    Picture("inspect.png", "inspect.html", (1400, 950)),
    Picture("inspect-dark.png", "inspect.html", (1400, 950), "dark"),
    Picture("report.png", "report.html", (1280, 1640)),
    Picture("bench-report.png", "bench.html", (1280, 1500)),
)


def write_pages(run: str, folder: Path) -> None:
    """The pages as the commands of docs/ make them."""
    for words in (
        ["inspect", run, "--text", str(ROOT / "nsa" / "attention.py"), "--max-tokens", "4096", "-o", "inspect.html"],
        ["report", run, "-o", "report.html"],
        ["bench", "report", str(RESULTS), "-o", "bench.html"],
    ):
        assert main([*words[:-1], str(folder / words[-1])]) == 0


def keep_a_token(page: Page) -> None:
    """Token 700 in layer 1, as if it were clicked."""
    page.wait_for_selector("#text[data-ready]")
    page.locator("#text p").nth(10).locator("i").nth(60).click()
    page.keyboard.press("]")
    page.wait_for_selector("#panel[data-token='700'][data-layer='1']")
    page.evaluate("scrollTo(0, document.querySelector('main').offsetTop - 40)")


def stamp(picture: Path, text: str) -> None:
    """Write a description into a PNG file, after its header, as `nsa bench plot` does."""
    data, chunk = picture.read_bytes(), b"tEXtDescription\0" + text.encode()
    added = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    picture.write_bytes(data[:PNG_HEADER] + added + data[PNG_HEADER:])


def take_pictures(run: str) -> None:
    rows = [row for file in files_of_rows([RESULTS]) for row in read_rows(file)]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        write_pages(run, Path(folder))
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for picture in PICTURES:
            width, height = picture.size
            page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=picture.scheme)
            page.goto((Path(folder) / picture.page).as_uri())
            if picture.page == "inspect.html":
                keep_a_token(page)
            page.screenshot(path=ROOT / "docs" / picture.name)
            page.close()
        stamp(ROOT / "docs" / "bench-report.png", rows_digest(rows))


if __name__ == "__main__":
    take_pictures(sys.argv[1])
