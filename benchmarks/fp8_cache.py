"""What an fp8 cache costs in accuracy: logits and selected blocks against the same model with an fp32 cache.

python benchmarks/fp8_cache.py --run runs/demo --half      # a trained model, on Python source
python benchmarks/fp8_cache.py --preset 125m               # random weights, random tokens

A text goes through the caches in chunks, so that all but a chunk's own window is read back from them. Rows are appended
to `benchmarks/results/cpu/fp8_cache.csv`. For scale, `--half` adds the same model in bf16 with a bf16 cache.
"""

from __future__ import annotations

import argparse
import copy
import csv
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.data.tokenizer import load_tokenizer
from nsa.model import LM, LMConfig, load_model
from nsa.results import origin_columns

RESULTS = Path(__file__).parent / "results" / "cpu" / "fp8_cache.csv"
CHUNK = 128


class Recorded:
    """The logits `[S, V]` of a text, and the blocks `[S, G, n_sel]` that each layer selected."""

    def __init__(self, model: LM, tokens: Tensor, **options: Any) -> None:
        selected: list[list[Tensor]] = [[] for _ in model.blocks]
        for block, found in zip(model.blocks, selected, strict=True):
            block.attention.run_modules = recording(block.attention.run_modules, found)  # type: ignore[union-attr]
        caches = model.new_cache(1, tokens.shape[1], **options)
        parts = [model(part, caches=caches) for part in tokens.split(CHUNK, dim=1)]
        for block in model.blocks:
            del block.attention.run_modules
        self.logits = torch.cat(parts, dim=1)[0].float()
        self.selected = [torch.cat(found) for found in selected]
        self.bytes_used = sum(cache.bytes_used() for cache in caches)
        self.bytes_read = sum(cache.bytes_read_per_step() for cache in caches)


def recording(run: Callable[..., Any], found: list[Tensor]) -> Callable[..., Any]:
    def recorded(*args: Any) -> Any:
        y, indices, gates = run(*args)
        found.append(indices[0])
        return y, indices, gates

    return recorded


def share_selected_alike(model: LM, one: Recorded, other: Recorded) -> float:
    """Of the blocks that importance decides about, the share that both select, where there are more to choose from."""
    c = model.config.attn
    alike = total = 0
    for a, b in zip(one.selected, other.selected, strict=True):
        own = torch.arange(len(a))[:, None, None] // c.l_sel
        # Neither forced, nor in a text so short that every block is selected.
        free = (a >= c.n_init) & (a <= own - c.n_local) & (own >= c.n_sel)
        alike += int(((a[..., None] == b[..., None, :]).any(dim=-1) & free).sum())
        total += int(free.sum())
    return alike / total


def compare(model: LM, exact: Recorded, other: Recorded, tokens: Tensor) -> dict[str, float]:
    error = other.logits - exact.logits
    log_p, log_q = (x.logits.log_softmax(dim=-1) for x in (exact, other))
    targets = tokens[0, 1:]
    return {
        "logit_std": exact.logits.std().item(),
        "logit_rms_error": error.square().mean().sqrt().item(),
        "logit_max_error": error.abs().max().item(),
        "kl": (log_p.exp() * (log_p - log_q)).sum(dim=-1).mean().item(),
        "same_top_token": (exact.logits.argmax(dim=-1) == other.logits.argmax(dim=-1)).float().mean().item(),
        "loss": F.cross_entropy(other.logits[:-1], targets).item(),
        "same_selected_blocks": share_selected_alike(model, exact, other),
        "bytes_used": other.bytes_used,
        "bytes_read_per_step": other.bytes_read,
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", type=Path, help="a folder that `nsa train` wrote")
    which.add_argument("--preset", help="a preset of LMConfig, with random weights")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the text")
    parser.add_argument("--half", action="store_true", help="also in bf16, which is slow on many CPUs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.run is not None:
        model, name = load_model(args.run), f"trained {args.run.name}"
        text = load_tokenizer(args.run).encode(inspect.getsource(argparse))
        tokens = torch.tensor([text[: args.length]])
    else:
        model, name = LM(LMConfig.preset(args.preset)).eval(), f"random {args.preset}"
        tokens = torch.randint(0, model.config.vocab_size, (1, args.length))
    exact = Recorded(model, tokens)
    caches = {("float32", "float32"): exact, ("float32", "fp8"): Recorded(model, tokens, quantize="fp8")}
    if args.half:
        half = copy.deepcopy(model).bfloat16()
        caches["bfloat16", "bfloat16"] = Recorded(half, tokens)
        caches["bfloat16", "fp8"] = Recorded(half, tokens, quantize="fp8")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    is_new = not args.out.exists()
    with args.out.open("a", newline="") as file:
        for (dtype, cache), recorded in caches.items():
            origin = origin_columns(torch.device("cpu"))
            measured = {key: f"{value:.6g}" for key, value in compare(model, exact, recorded, tokens).items()}
            row = {"model": name, "S": tokens.shape[1], "dtype": dtype, "cache": cache, **measured, **origin}
            writer = csv.DictWriter(file, row, lineterminator="\n")
            if is_new:
                writer.writeheader()
                is_new = False
            writer.writerow(row)
            print(*(f"{key}={value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
