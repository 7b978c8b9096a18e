"""`nsa inspect`'s page: one self-contained file.

The text, the layer map and the charts are plain HTML, so that they show at once. What each token did is packed per
layer (arrays, deflated, in base64) and unpacked by the page's script after the first paint.
"""

from __future__ import annotations

import base64
import json
import zlib
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from nsa.config import BRANCHES, require
from nsa.files import make_folder, replace_text
from nsa.inspection.record import Inspection, LayerRecord
from nsa.tensor_file import raw
from nsa.train.report import distances
from nsa.train.report.charts import POINTS, Chart, heat_table, render_page, tiles_html

# No block, in 16 bits.
NONE = 0xFFFF
# A parser of HTML turns a bare CR into LF, and drops NUL, which has no character reference: its symbol is shown.
CONTROLS = str.maketrans({"\r": "&#13;", "\0": "\u2400"})


def write_page(inspection: Inspection, path: Path, title: str) -> None:
    """Write a page that needs no network.

    Args:
        inspection: What `inspect_model` returned.
        path: The file, in a folder that is made.
        title: The page's heading.

    Raises:
        ValueError: The text has more blocks than 16 bits can number.
    """
    n_blocks = -(-len(inspection.tokens) // min(inspection.config.d, inspection.config.l_sel))
    require(n_blocks <= NONE, "the blocks of the text", n_blocks, f"at most {NONE:,} on a page")
    make_folder(path.parent)
    replace_text(path, page_html(inspection, title))


def page_html(inspection: Inspection, title: str) -> str:
    names = ("inspect.css", "inspect.js", "panel.html")
    style, script, panel = (files(__package__).joinpath(name).read_text("utf-8") for name in names)
    layers = (
        f'<script type="application/octet-stream" class="layer">{packed(record)}</script>'
        for record in inspection.layers.values()
    )
    gates = heat_table("Mean gate by layer", BRANCHES, {n: record.gate_mean for n, record in inspection.layers.items()})
    histogram = "".join(distances({"counts": inspection.distances}))
    body = [
        tiles_html(title, key_numbers(inspection)),
        f'<div class="cards">{gates}{histogram}{reads_chart(inspection)}</div>',
        f'<main class="inspect"><div id="text" tabindex="0" role="group" aria-label="Tokens">{text(inspection)}'
        f"</div>{panel}</main>",
        f'<script type="application/json" id="meta">{meta(inspection)}</script>',
        *layers,
    ]
    return render_page(title, body, style, script)


def key_numbers(inspection: Inspection) -> dict[str, str]:
    length, reads = len(inspection.tokens), inspection.reads
    mean, dense = reads.mean().item(), (length + 1) / 2
    return {
        "tokens": f"{length:,}",
        "NSA layers, groups": f"{len(inspection.layers)} <small>x</small> {inspection.config.n_kv_groups}",
        "keys read by the last token": f"{reads[-1].item():,.0f} <small>of {length:,}</small>",
        "keys read per token, mean": f"{mean:,.0f} <small>dense {dense:,.0f}</small>",
    }


def reads_chart(inspection: Inspection) -> str:
    length = len(inspection.tokens)
    at = range(0, length, -(-length // POINTS))
    own = [(float(t), inspection.reads[t].item()) for t in at]
    return Chart("Keys read per token", [("NSA", own), ("dense", [(float(t), t + 1.0) for t in at])]).html()


def text(inspection: Inspection) -> str:
    """A row per selection block, an element per token."""
    size, pieces = inspection.config.l_sel, inspection.pieces
    return "".join(
        f"<p><b>{begin // size}</b>{''.join(map(token_html, pieces[begin : begin + size]))}</p>"
        for begin in range(0, len(pieces), size)
    )


def token_html(piece: str) -> str:
    return f"<i>{escape(piece).translate(CONTROLS)}</i>"


def meta(inspection: Inspection) -> str:
    c, record = inspection.config, next(iter(inspection.layers.values()))
    values: dict[str, Any] = {
        "n": len(inspection.tokens),
        "layers": list(inspection.layers),
        "groups": c.n_kv_groups,
        "nSel": c.n_sel,
        "top": record.blocks.shape[2],
        "block": c.l_sel,
        "cmpBlock": c.l,
        "cmpStride": c.d,
        "window": c.w,
        "nInit": c.n_init,
        "nLocal": c.n_local,
    }
    return json.dumps(values)


def packed(record: LayerRecord) -> str:
    """The arrays of a layer in the order that the script reads them, tokens innermost: neighbors are alike."""
    # `[S, G, k]` as `[G, k, S]`: blocks in little-endian 16 bits, fractions in 8.
    arrays = [x.where(x >= 0, NONE).to(torch.uint16) for x in (record.selected, record.blocks)]
    arrays += [(x * 255).round().clamp(0, 255).to(torch.uint8) for x in (record.group_gates, record.weights)]
    # `raw` does not keep its tensor.
    arrays = [x.permute(1, 2, 0).contiguous() for x in arrays]
    return base64.b64encode(zlib.compress(b"".join(bytes(raw(x)) for x in arrays), 6)).decode()
