"""The figures of docs/concepts.md, drawn from the reference: what one query reads, the masks, block overlaps.

python docs/tools/figures.py      # writes docs/figures/*.svg; tests/test_docs.py compares them

The sizes can be counted: 64 tokens, compression blocks of 8 at stride 4, selection blocks of 8, a window of 12.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from nsa import reference
from nsa.reference.visibility import sees_compressed, sees_selected, sees_window

FOLDER = Path(__file__).parent.parent / "figures"
TOKENS, QUERY = 64, 58
BLOCKS = {"block": 8, "stride": 4}
SELECT = {"select_block": 8, "n_select": 5, "n_init": 1, "n_local": 2}
WINDOW = 12
COMPRESSED, SELECTED, SLIDING, QUIET = "#3a86c8", "#2f9e6e", "#d98324", "#9aa0a6"
STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #24292f }
.small { font-size: 11px }
rect { shape-rendering: crispEdges }
.outline { fill: none; stroke: #24292f; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) { text { fill: #d8dee4 } .outline { stroke: #d8dee4 } }
</style>"""


def rect(x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0) -> str:
    shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {shape} fill="{fill}"' + (f' fill-opacity="{opacity:.2f}"/>' if opacity < 1 else "/>")


def outline(x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="outline" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'


def text(x: float, y: float, words: str, *, small: bool = False, anchor: str = "start") -> str:
    kind = ' class="small"' if small else ""
    return f'<text{kind} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    return "\n".join([head, f"<title>{title}</title>", STYLE, *parts, "</svg>", ""])


class Example:
    """One group of two heads over random keys, in fp64: what the reference computes for them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.q, k = (torch.randn(1, TOKENS, n, 16, generator=generator, dtype=torch.float64) for n in (2, 1))
        self.k_cmp = reference.compress_mean(3 * k, **BLOCKS)
        self.n_cmp = self.k_cmp.shape[1]
        _, self.lse = reference.compressed_attention(self.q, self.k_cmp, self.k_cmp, **BLOCKS)
        arguments = self.q, self.k_cmp, self.lse
        self.importance = reference.selection_importance(*arguments, **BLOCKS, select_block=SELECT["select_block"])
        self.indices = reference.select_blocks(*arguments, **BLOCKS, **SELECT)

    def probabilities(self) -> Tensor:
        """`[N]`: the query's compressed attention, mean over heads."""
        scores = torch.einsum("hd,nd->hn", self.q[0, QUERY], self.k_cmp[0, :, 0]) * self.q.shape[-1] ** -0.5
        p = (scores - self.lse[0, QUERY, :, None]).exp().mean(dim=0)
        return p.where(self.compressed()[QUERY], 0.0)

    def compressed(self) -> Tensor:
        return sees_compressed(self.q, self.n_cmp, *BLOCKS.values(), None, None)[0]

    def selected(self) -> Tensor:
        return sees_selected(self.q, TOKENS, self.indices, SELECT["select_block"], None, None)[0, :, 0]

    def sliding(self) -> Tensor:
        return sees_window(self.q, TOKENS, WINDOW, None, None)[0]


def one_query(example: Example) -> str:
    """What the query at position 58 reads, branch by branch."""
    cell, left = 12, 120
    width = left + TOKENS * cell + 20

    def x(token: int) -> int:
        return left + token * cell

    def cells(y: int, visible: list[bool], fill: str) -> list[str]:
        return [rect(x(t), y, cell - 2, 14, fill if on else QUIET, 1.0 if on else 0.25) for t, on in enumerate(visible)]

    parts = [text(0, 33, "tokens"), *cells(22, [t <= QUERY for t in range(TOKENS)], QUIET)]
    parts += [outline(x(QUERY) - 1, 20, cell, 18), text(x(QUERY) + 5, 14, "query", small=True, anchor="middle")]

    parts.append(text(0, 76, "compressed"))
    weights = example.probabilities()
    visible = example.compressed()[QUERY].tolist()
    for i, on in enumerate(visible):
        y = 60 + 15 * (i % 2)
        share = 0.15 + 0.85 * float(weights[i] / weights.max())
        fill, opacity = (COMPRESSED, share) if on else (QUIET, 0.25)
        parts.append(rect(x(i * BLOCKS["stride"]), y, BLOCKS["block"] * cell - 2, 12, fill, opacity))

    parts.append(text(0, 130, "importance"))
    importance = example.importance[0, QUERY, 0]
    taken = set(example.indices[0, QUERY, 0].tolist())
    own = QUERY // SELECT["select_block"]
    for j, value in enumerate(importance.tolist()):
        height = 40 * value / float(importance.max())
        block_width = SELECT["select_block"] * cell
        start = x(j * SELECT["select_block"])
        parts.append(rect(start, 145 - height, block_width - 2, height, SELECTED if j in taken else QUIET))
        forced = "first" if j < SELECT["n_init"] else "local" if j > own - SELECT["n_local"] else ""
        label = f"{j}, {forced}" if forced else f"{j}, selected" if j in taken else f"{j}"
        parts.append(text(start + block_width / 2, 159, label, small=True, anchor="middle"))

    parts += [text(0, 188, "selected"), *cells(177, example.selected()[QUERY].tolist(), SELECTED)]
    parts += [text(0, 222, "sliding"), *cells(211, example.sliding()[QUERY].tolist(), SLIDING)]
    counts = [
        int(sum(seen)) for seen in (visible, example.selected()[QUERY].tolist(), example.sliding()[QUERY].tolist())
    ]
    parts.append(
        text(
            0,
            256,
            f"output = g_cmp · compressed ({counts[0]} keys) + g_sel · selected ({counts[1]} keys)"
            f" + g_win · sliding ({counts[2]} keys)",
        )
    )
    return svg(width, 270, "What one query reads in each branch", parts)


def masks(example: Example) -> str:
    """Queries downwards, keys to the right, for each branch."""
    cell, gap, top = 4, 50, 40
    parts, x = [], 0
    for name, mask, fill in (
        ("compressed", example.compressed(), COMPRESSED),
        ("selected", example.selected(), SELECTED),
        ("sliding", example.sliding(), SLIDING),
    ):
        n_keys = mask.shape[1]
        width = n_keys * cell
        parts += [text(x, 14, name), text(x, 30, f"{n_keys} keys", small=True)]
        parts.append(rect(x, top, width, TOKENS * cell, QUIET, 0.2))
        for t, row in enumerate(mask.tolist()):
            parts += [
                rect(x + begin * cell, top + t * cell, (end - begin) * cell, cell, fill) for begin, end in runs(row)
            ]
        x += max(width, 90) + gap
    return svg(x - gap + 10, top + TOKENS * cell + 10, "Masks of the three branches", parts)


def runs(row: list[bool]) -> list[tuple[int, int]]:
    """Begin and end of each run of true values."""
    edges = [i for i in range(len(row) + 1) if (i > 0 and row[i - 1]) != (i < len(row) and row[i])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def overlaps() -> str:
    """With the default sizes: the weights by which compression blocks count for one selection block."""
    block, stride, select_block, j = 32, 16, 64, 1
    pixel, left = 4, 140
    weights = reference.overlap_weights(10, 3, block, stride, select_block)[:, j].tolist()

    def x(token: int) -> int:
        return left + token * pixel

    parts = [text(0, 29, "selection blocks")]
    for index in range(3):
        fill, opacity = (SELECTED, 1.0) if index == j else (QUIET, 0.3)
        parts.append(rect(x(index * select_block), 18, select_block * pixel - 3, 16, fill, opacity))
    parts.append(text(0, 76, "compression blocks"))
    for i, weight in enumerate(weights):
        y = 50 + 20 * (i % 2)
        start = x(i * stride)
        parts.append(rect(start, y, block * pixel - 3, 16, COMPRESSED if weight else QUIET, 0.35 * weight or 0.2))
        parts.append(text(start + block * pixel / 2, y + 12, f"× {weight}", small=True, anchor="middle"))
    return svg(left + 3 * select_block * pixel + 10, 100, "How compression blocks count for a selection block", parts)


def figures() -> dict[str, str]:
    """The text of each file, by name."""
    example = Example()
    return {"one-query.svg": one_query(example), "masks.svg": masks(example), "overlaps.svg": overlaps()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, content in figures().items():
        (FOLDER / name).write_text(content)
        print(FOLDER / name)
