"""The page holds the text and packed arrays, needs no network, and in a real browser shows what the API reports.

`browsing.py` opens it; without a browser these tests are skipped.
"""

from __future__ import annotations

import base64
import inspect
import json
import math
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from browsing import Browser
from generating import small_model

from nsa import NSAConfig
from nsa.cli import main
from nsa.data.tokenizer import ByteTokenizer
from nsa.inspection import Inspection, inspect_model, write_page
from nsa.model import LM, LMConfig, save_model

TEXT = "".join(f"line {index} <b>of</b> a text & näïve ✓\n" for index in range(40))


def make_page(path: Path, text: str = TEXT) -> Inspection:
    inspection = inspect_model(small_model("nsa", 256), ByteTokenizer(), text)
    write_page(inspection, path, "a <title>")
    return inspection


def test_the_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    make_page(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    assert not re.search(r"https?:|url\(|@import|<link|<img|\bsrc=", html)
    assert "default-src 'none'" in html
    assert "<b>of</b>" not in html
    assert "a &lt;title&gt;" in html


def test_the_packed_arrays_are_those_of_the_layers(tmp_path: Path) -> None:
    inspection = make_page(tmp_path / "page.html")
    blobs = re.findall(r'class="layer">([^<]+)<', (tmp_path / "page.html").read_text())
    assert len(blobs) == 2
    data = zlib.decompress(base64.b64decode(blobs[1]))
    n, record = len(inspection.tokens), inspection.layers[1]
    size = 2 * n * record.selected.shape[2]
    selected = torch.frombuffer(bytearray(data[:size]), dtype=torch.uint16).int().view(-1, n).T
    assert (selected.where(selected != 0xFFFF, -1) == record.selected[:, 0]).all()
    gates = torch.frombuffer(bytearray(data[size + 2 * n * 4 :]), dtype=torch.uint8)[: 3 * n].view(3, n).T / 255
    torch.testing.assert_close(gates, record.group_gates[:, 0], atol=0.003, rtol=0)


def test_more_blocks_than_16_bits_number_are_refused(tmp_path: Path) -> None:
    inspection = inspect_model(small_model("nsa", 256), ByteTokenizer(), "some text")
    longer = replace(inspection, tokens=[0] * 2**18)
    with pytest.raises(ValueError, match=r"blocks .*is 65536; accepted: "):
        write_page(longer, tmp_path / "page.html", "long")


def test_the_command_writes_a_page_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(small_model("nsa", 256).float(), tmp_path / "run")
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    run, page = str(tmp_path / "run"), tmp_path / "page.html"
    assert main(["inspect", run, "--text", str(file), "-o", str(page), "--max-tokens", "100"]) == 0
    assert "run: 100 tokens" in page.read_text()
    printed = capsys.readouterr()
    assert "first 100 tokens" in printed.err
    assert "layer 2/2" in printed.out
    assert main(["inspect", run, "--prompt", "some text", "--json", str(tmp_path / "new" / "found.json")]) == 0
    assert json.loads((tmp_path / "new" / "found.json").read_text())["tokens"] == list(b"some text")
    capsys.readouterr()
    assert main(["inspect", run, "--prompt", "some text", "--json", "-"]) == 0
    assert "".join(json.loads(capsys.readouterr().out)["pieces"]) == "some text"


def test_a_model_whose_gates_are_not_finite_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model("nsa", 256).float()
    name, x = next(model.named_parameters())
    with torch.no_grad():
        x.fill_(math.nan)
    save_model(model, tmp_path / "run")
    written = tmp_path / "found.json"
    assert main(["inspect", str(tmp_path / "run"), "--prompt", "some text", "--json", str(written)]) == 2
    assert name in capsys.readouterr().err
    assert not written.exists()


def test_the_command_needs_somewhere_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path), "--prompt", "x"]) == 2
    assert "--json" in capsys.readouterr().err
    for flag in ("--out", "--json"):
        # Before the model is loaded: the folder has none.
        assert main(["inspect", str(tmp_path), "--prompt", "some text", flag, str(tmp_path)]) == 2
        assert f"{flag} is {str(tmp_path)!r}; accepted: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--prompt some --out /proc/page.html", "--out is '/proc/page.html'"),
        ("--prompt some --json /proc/new/found.json", "--json is '/proc/new/found.json'"),
        ("--prompt some -o new/page --json new/page", "--json is 'new/page'"),
        ("--prompt EMPTY --json -", "--prompt is ''"),
        ("--prompt a\udcff --json -", r"--prompt is 'a\udcff'"),
        ("--text FILE --json -", "--text is ''"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_is_read(
    flags: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").touch()
    words = [{"EMPTY": "", "FILE": str(tmp_path / "empty.txt")}.get(word, word) for word in flags.split()]
    assert main(["inspect", str(tmp_path), *words]) == 2
    assert named in capsys.readouterr().err


# In a browser.

READY = "#text[data-ready]"
HIGHLIGHTED = """() => [...document.querySelectorAll('#text p.sel')].map(
  row => [...row.querySelectorAll('i:not(.later)')].map(token => token.textContent).join(''))"""
MARKED = "name => [...document.querySelectorAll('#text i.' + name)].map(token => token.textContent).join('')"


def shown(page: Any, token: int, layer: int) -> None:
    page.wait_for_selector(f"#panel[data-token='{token}'][data-layer='{layer}']", state="attached")


def check_marks(page: Any, inspection: Inspection, token: int, layer: int) -> None:
    shown(page, token, layer)
    assert page.evaluate(HIGHLIGHTED) == inspection.selected_words(token, layer, 0)
    window = inspection.window(token)
    assert page.evaluate(MARKED, "win") == inspection.text(window.start, window.stop)
    covered = sorted({t for tokens, _ in inspection.compressed(token, layer, 0) for t in tokens})
    assert page.evaluate(MARKED, "cmp") == "".join(inspection.pieces[t] for t in covered)
    # The token itself stands out from its block, which is selected too.
    color = "node => getComputedStyle(node).backgroundColor"
    assert page.locator("#text i.at").evaluate(color) == page.locator("body").evaluate(
        "node => getComputedStyle(node).color"
    )
    gates = [float(cell) for cell in page.locator("#gates td:last-child").all_text_contents()]
    assert gates == pytest.approx(list(inspection.gates(token, layer, 0).values()), abs=0.01)


def visible(inspection: Inspection, token: int) -> int:
    """The first token from `token` on that can be clicked: not part of a character, no space."""
    return next(t for t in range(token, len(inspection.tokens)) if inspection.pieces[t].strip())


def click(page: Any, inspection: Inspection, token: int) -> None:
    block, place = divmod(token, inspection.config.l_sel)
    page.locator("#text p").nth(block).locator("i").nth(place).click()


def test_the_highlighted_words_are_those_of_the_api(browser: Browser, tmp_path: Path) -> None:
    inspection = make_page(tmp_path / "page.html")
    page = browser.open(tmp_path / "page.html", READY)
    check_marks(page, inspection, len(inspection.tokens) - 1, 0)
    for wanted in (700, 5, 333):
        token = visible(inspection, wanted)
        click(page, inspection, token)
        check_marks(page, inspection, token, 0)
    page.select_option("#layer", "1")
    check_marks(page, inspection, token, 1)
    assert not browser.problems


def test_the_keyboard_moves_through_tokens_and_layers(browser: Browser, tmp_path: Path) -> None:
    inspection = make_page(tmp_path / "page.html")
    page = browser.open(tmp_path / "page.html", READY, "dark")
    page.locator("#text").focus()
    page.keyboard.press("Home")
    shown(page, 0, 0)
    for key, token, layer in (
        ("ArrowRight", 1, 0),
        ("ArrowDown", 1 + inspection.config.l_sel, 0),
        ("ArrowLeft", inspection.config.l_sel, 0),
        ("]", inspection.config.l_sel, 1),
        ("End", len(inspection.tokens) - 1, 1),
    ):
        page.keyboard.press(key)
        check_marks(page, inspection, token, layer)
    assert not browser.problems


def test_pointing_shows_a_token_until_one_is_kept(browser: Browser, tmp_path: Path) -> None:
    inspection = make_page(tmp_path / "page.html")
    page = browser.open(tmp_path / "page.html", READY)
    rows = page.locator("#text p")
    first, kept = visible(inspection, 2 * inspection.config.l_sel), visible(inspection, 40)
    under = rows.nth(2).locator("i").nth(first % inspection.config.l_sel)
    under.hover()
    shown(page, first, 0)
    click(page, inspection, kept)
    under.hover()
    shown(page, kept, 0)
    page.keyboard.press("Escape")
    page.mouse.move(0, 0)
    under.hover()
    shown(page, first, 0)
    assert not browser.problems


def test_line_ends_and_controls_are_shown_as_they_are(browser: Browser, tmp_path: Path) -> None:
    inspection = make_page(tmp_path / "page.html", "one\r\ntwo\rthree \x1b[0m\t\x0c\0 four\n" * 20)
    page = browser.open(tmp_path / "page.html", READY)
    words = [text.replace("\0", "\u2400") for text in inspection.selected_words(len(inspection.tokens) - 1, 0, 0)]
    assert page.evaluate(HIGHLIGHTED) == words
    assert not browser.problems


@pytest.mark.slow
@pytest.mark.parametrize("length", [1000, 32768])
def test_a_long_text_paints_within_two_seconds(length: int, browser: Browser, tmp_path: Path) -> None:
    """Source of the standard library and 12 layers, of which the model computes two."""
    attn = NSAConfig(dim=32, n_heads=2, n_kv_groups=2, d_k=16, d_v=16)
    model = LM(LMConfig(vocab_size=256, n_layers=2, hidden=32, seq_len=64, attn=attn)).eval()
    made = inspect_model(model, ByteTokenizer(), Path(inspect.__file__).read_text(), max_tokens=length)
    inspection = replace(made, layers={layer: made.layers[layer % 2] for layer in range(12)})
    write_page(inspection, tmp_path / "page.html", "long")
    page = browser.open(tmp_path / "page.html", READY)
    paints = page.evaluate("performance.getEntriesByType('paint').map(entry => entry.startTime)")
    assert paints
    assert max(paints) < 2000
    token = visible(inspection, length // 2)
    click(page, inspection, token)
    check_marks(page, inspection, token, 0)
    assert not browser.problems
