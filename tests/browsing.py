"""A real browser for tests of pages: Debian's Chromium through Playwright's client.

Without both, tests that take the fixture `browser` are skipped: apt-get install chromium && pip install '.[browser]'
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S


class Browser:
    """Opens pages; `problems` are the console errors and requests of the last one."""

    def __init__(self, chromium: Any) -> None:
        self.chromium = chromium

    def open(self, path: Path, ready: str = "body", scheme: str = "light") -> Any:
        """The page, once the selector `ready` is there."""
        page = self.chromium.new_page(color_scheme=scheme, viewport={"width": 1300, "height": 900})
        page.set_default_timeout(1000 * PATIENCE_S)
        self.problems: list[str] = []
        page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.problems.append(request.url) if "file:" not in request.url else None)
        page.goto(path.as_uri())
        page.wait_for_selector(ready)
        return page


def start_browser() -> Iterator[Browser]:
    """A browser until the generator is closed; skips the test where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install '.[browser]'")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"], timeout=1000 * PATIENCE_S)
        yield Browser(chromium)
        chromium.close()
