"""One forward pass over a text, and what every NSA layer did in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from nsa.attention import NSAAttention
from nsa.config import BRANCHES, NSAConfig, require, require_positive_int
from nsa.data.tokenizer import Tokenizer, check_vocabulary
from nsa.generation.text import TextStream
from nsa.geometry import n_compressed_of
from nsa.model import LM
from nsa.train.run_stats import watching
from nsa.train.step import autocast

# Scores that are in memory at once.
SCORES_AT_ONCE = 2**24


@dataclass(frozen=True)
class LayerRecord:
    """A record of one layer's forward pass; S tokens, Hq heads, G groups. All tensors are on the CPU.

    Args:
        layer: Its number in the model.
        gates: `[S, Hq, 3]`, in the order compressed, selected, sliding.
        selected: int32 `[S, G, n_sel]` selected blocks, ascending, -1: none.
        blocks: int32 `[S, G, k]`, the compression blocks with the most attention, the first the most; -1: none.
        weights: `[S, G, k]`, their share of it: the mean over the heads of the group; 0: none.
        gate_mean: By branch, the mean over tokens and heads.
        distances: How many selected blocks lie 0, 1, 2, ... blocks back.
    """

    layer: int
    gates: Tensor
    selected: Tensor
    blocks: Tensor
    weights: Tensor
    gate_mean: dict[str, float]
    distances: list[int]

    @cached_property
    def group_gates(self) -> Tensor:
        return self.gates.unflatten(1, (self.selected.shape[1], -1)).mean(dim=2)


@dataclass(frozen=True)
class Inspection:
    """A text and what each NSA layer did with it. Tokens, layers and groups are numbered from 0; a layer has its number
    in the model, and layers other than NSA's are left out.

    Args:
        config: The layers'.
        tokens: Token ids.
        pieces: The text of each token; a character of several tokens belongs to its last one.
        layers: By number.
    """

    config: NSAConfig
    tokens: list[int]
    pieces: list[str]
    layers: dict[int, LayerRecord]

    def selected_blocks(self, token: int, layer: int, group: int) -> list[int]:
        """The selection blocks of a token.

        Args:
            token, layer, group: Which ones.

        Returns:
            The numbers of the blocks, ascending.
        """
        return [block for block in self.layers[layer].selected[token, group].tolist() if block >= 0]

    def selected_words(self, token: int, layer: int, group: int) -> list[str]:
        """The text of the selection blocks of a token.

        Args:
            token, layer, group: Which ones.

        Returns:
            The text of each selected block, up to the token.
        """
        size = self.config.l_sel
        return [
            self.text(block * size, min((block + 1) * size, token + 1))
            for block in self.selected_blocks(token, layer, group)
        ]

    def window(self, token: int) -> range:
        """The sliding window of a token.

        Args:
            token: Which one.

        Returns:
            The tokens of the window, its own included.
        """
        return range(max(0, token - self.config.w + 1), token + 1)

    def compressed(self, token: int, layer: int, group: int) -> list[tuple[range, float]]:
        """The compression blocks to which a token attends the most.

        Args:
            token, layer, group: Which ones.

        Returns:
            The tokens of each block, and its share of the compressed attention, the largest first.
        """
        record, c = self.layers[layer], self.config
        found = zip(record.blocks[token, group].tolist(), record.weights[token, group].tolist(), strict=True)
        return [(range(block * c.d, block * c.d + c.l), weight) for block, weight in found if block >= 0]

    def gates(self, token: int, layer: int, group: int) -> dict[str, float]:
        """The gates of a token.

        Args:
            token, layer, group: Which ones.

        Returns:
            By branch (`cmp`, `sel`, `win`), the mean over the heads of the group.
        """
        return dict(zip(BRANCHES, self.layers[layer].group_gates[token, group].tolist(), strict=True))

    def text(self, begin: int, end: int) -> str:
        """The text of some tokens.

        Args:
            begin, end: The first token, and the one after the last.

        Returns:
            The text.
        """
        return "".join(self.pieces[begin:end])

    @cached_property
    def reads(self) -> Tensor:
        """`[S]`: keys that each token reads in the three branches, the mean over groups and layers. Dense attention
        reads `token + 1`."""
        c = self.config
        lengths = torch.arange(1, len(self.tokens) + 1)
        selected = torch.zeros(len(self.tokens))
        for record in self.layers.values():
            blocks = record.selected.long()
            tokens = (lengths[:, None, None] - blocks * c.l_sel).clamp(0, c.l_sel).where(blocks >= 0, 0)
            selected += tokens.sum(dim=2).float().mean(dim=1)
        return selected / len(self.layers) + n_compressed_of(lengths, c.l, c.d) + lengths.clamp_max(c.w)

    @cached_property
    def distances(self) -> list[int]:
        """How many selected blocks lie 0, 1, 2, ... blocks back, in all layers together."""
        return [sum(counts) for counts in zip_longest(*(r.distances for r in self.layers.values()), fillvalue=0)]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON types, for a script.

        Returns:
            `config`, `tokens`, `pieces`, `reads`, `distances`, and `layers` by number.
        """
        return {
            "config": self.config.to_dict(),
            "tokens": self.tokens,
            "pieces": self.pieces,
            "reads": [round(x, 2) for x in self.reads.tolist()],
            "distances": self.distances,
            "layers": {
                layer: {
                    "gate_mean": record.gate_mean,
                    "gates": rounded(record.group_gates),
                    "selected": record.selected.tolist(),
                    "compressed": {"blocks": record.blocks.tolist(), "weights": rounded(record.weights)},
                }
                for layer, record in self.layers.items()
            },
        }


def rounded(x: Tensor) -> list[Any]:
    """The values rounded to four decimals, which are shorter in JSON than fp32's."""
    values: list[Any] = x.double().round(decimals=4).tolist()
    return values


@torch.inference_mode()
def inspect_model(
    model: LM,
    tokenizer: Tokenizer,
    text: str,
    *,
    top: int = 4,
    max_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Inspection:
    """Run a text through a model and record what its NSA layers do.

    Args:
        model: The model, on its device.
        tokenizer: The model's.
        text: At least one token.
        top: Compression blocks recorded per token, layer and group.
        max_tokens: Of a longer text, its first tokens are taken. None: all.
        dtype: Of matmuls, by autocast. None: the parameters'.
        progress: Called with the number of NSA layers that the text has reached, at each of them.

    Returns:
        Gates, selected blocks and compressed attention of every token, by layer and group.

    Raises:
        ValueError: The model has no NSA layer, the text is empty, or a number is less than 1.
    """
    check_vocabulary(tokenizer, model.config.vocab_size, name="vocab_size of the model")
    require_positive_int("top", top)
    if max_tokens is not None:
        require_positive_int("max_tokens", max_tokens)
    tokens = tokenizer.encode(text)[:max_tokens]
    require(len(tokens) > 0, "the tokens of the text", 0, "at least 1")
    require("nsa" in model.config.kinds, "attention", model.config.attention, "a model with at least one NSA layer")
    row = torch.tensor([tokens], device=model.head_weight.device)
    tops: dict[int, tuple[Tensor, Tensor]] = {}

    def take(index: int, attention: NSAAttention, x: Tensor) -> None:
        progress(len(tops) + 1)
        tops[index] = most_attended(attention, x, top)

    with watching(model, take) as stats:
        if dtype is None:
            model.hidden(row)
        else:
            with autocast(row.device, dtype):
                model.hidden(row)
    layers = {}
    for index, found in stats.items():
        tensors = (found.gates[0].float().cpu(), found.indices[0].cpu(), *tops[index])
        layers[index] = LayerRecord(index, *tensors, found.gate_mean, found.selected_distance.tolist())
    stream = TextStream(tokenizer)
    pieces = [stream.push([token]) for token in tokens]
    pieces[-1] += stream.close()
    return Inspection(model.config.attn, tokens, pieces, layers)


def most_attended(attention: NSAAttention, x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The `top` compression blocks with the most attention of a layer with the input `x [1, S, dim]`, on the CPU: int32
    `[S, G, top]` blocks and fp32 weights, -1 and 0 where fewer are visible."""
    c = attention.config
    q, raw, _, _ = attention.project(x, attention.angles(x, None, None, 0))
    k_cmp = attention.compress_all(raw, None, 0)[0][0]
    length, n_blocks = x.shape[1], k_cmp.shape[0]
    blocks = torch.full((length, c.n_kv_groups, top), -1, dtype=torch.int32)
    weights = torch.zeros(length, c.n_kv_groups, top)
    if n_blocks == 0:
        return blocks, weights
    q = q[0].unflatten(1, (c.n_kv_groups, -1)).float() * c.d_k**-0.5
    keys = k_cmp.float()
    ends = torch.arange(n_blocks, device=x.device) * c.d + c.l - 1
    step = max(1, SCORES_AT_ONCE // (c.n_heads * n_blocks))
    # Before token l - 1 no block is complete.
    for begin in range(c.l - 1, length, step):
        rows = slice(begin, min(begin + step, length))
        hidden = ends > torch.arange(rows.start, rows.stop, device=x.device)[:, None]
        scores = torch.einsum("sghd,ngd->sghn", q[rows], keys).masked_fill(hidden[:, None, None], float("-inf"))
        best = scores.softmax(dim=-1).mean(dim=2).topk(min(top, n_blocks), dim=-1)
        n = best.values.shape[-1]
        weights[rows, :, :n] = best.values.cpu()
        blocks[rows, :, :n] = best.indices.int().where(best.values > 0, -1).cpu()
    return blocks, weights
