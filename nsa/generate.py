"""Text from a trained model.

nsa generate --run runs/tiny-nsa --prompt "def main(" --max-new-tokens 200 --temperature 0.8
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.config import require, require_int
from nsa.data.tokenizer import Tokenizer
from nsa.dtypes import DTYPES
from nsa.generation.engine import Generation
from nsa.generation.options import Options
from nsa.generation.text import TextGeneration
from nsa.machine import usable_device
from nsa.model import LM
from nsa.progress import is_terminal, lossy, say
from nsa.train.run_folder import RUNS
from nsa.train.run_model import load_run

MIB = 2**20


def generate(
    model: LM,
    prompts: Tensor | Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> Tensor:
    """Generate the tokens that follow each prompt.

    Args:
        model: The model, on its device.
        prompts: Token ids `[B, S]`, or a list of rows of any lengths.
        max_new_tokens: Most tokens per row.
        stop: Called after each step; once it returns True, the tokens so far are returned.
        options: Any other argument of `nsa.generation.options.Options`: `temperature`, `top_k`, `top_p`, `min_p`,
            `repetition_penalty`, `seed`, `end`, `prompt_lookup`, `lookup_ngram`, `max_len`, `prefill_chunk`,
            `cuda_graph`, `quantize`, `page_size`, `save_cache`, `load_cache`.

    Returns:
        `[B, T]` int64, with T the tokens of the longest row. A row that ended earlier, by `end` or because its logits
        are not finite, is filled with -1, which is no token.

    Raises:
        ValueError: A prompt or an option is impossible.
    """
    if isinstance(prompts, Tensor):
        require(prompts.dim() == 2, "prompts.shape", tuple(prompts.shape), "two dimensions [B, S]")
    generation = Generation(model, as_lists(prompts), Options(max_new_tokens=max_new_tokens, **options))
    for _ in generation:
        if stop():
            break
    longest = max(len(row.tokens) for row in generation.rows)
    rows = [row.tokens + [-1] * (longest - len(row.tokens)) for row in generation.rows]
    return torch.tensor(rows, dtype=torch.long, device=model.head_weight.device)


def as_lists(values: Any) -> Any:
    """Tensors, and the arrays and integers of NumPy, as lists and `int`, also inside of lists."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return list(map(as_lists, values)) if isinstance(values, list | tuple) else values


def generate_text(
    model: LM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_new_tokens: int,
    *,
    stop_strings: Sequence[str] = (),
    **options: Any,
) -> list[str]:
    """Generate the text that follows each prompt.

    Args:
        model: The model, on its device.
        tokenizer: The model's, for example of `load_tokenizer`.
        prompts: Texts of at least one token.
        max_new_tokens: Most tokens per row.
        stop_strings: A row ends before the first of them that it generates.
        options: As for `generate`; `end` is the tokenizer's unless it is given.

    Returns:
        The new text of each row, without its prompt.

    Raises:
        ValueError: A prompt or an option is impossible, or the model's logits are not finite.
    """
    given = Options(**{"end": tokenizer.end, "max_new_tokens": max_new_tokens, **options})
    generation = TextGeneration(model, tokenizer, prompts, given, stop_strings=stop_strings)
    texts = ["" for _ in prompts]
    for pieces in generation:
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    return texts


class OrderedRows:
    """Writes rows one after the other: the first that is not finished as it grows, those after it once it is."""

    def __init__(self, write: Callable[[str], None], heads: Sequence[str]) -> None:
        self.write = write
        self.waiting = list(heads)
        self.current = 0

    def add(self, pieces: Sequence[str], finished: Callable[[int], bool]) -> None:
        self.waiting = [text + piece for text, piece in zip(self.waiting, pieces, strict=True)]
        while self.current < len(self.waiting):
            row = self.current
            done = finished(row)
            text, self.waiting[row] = self.waiting[row] + ("\n" if done else ""), ""
            if text:
                self.write(text)
            if not done:
                break
            self.current += 1


def newest_run(runs: Path = RUNS) -> Path:
    found = sorted(runs.glob("*/model.json"), key=lambda path: path.stat().st_mtime)
    require(bool(found), "--run", f"not given, and {runs}/ has no trained model", "a folder that `nsa train` wrote")
    return found[-1].parent


def run(args: argparse.Namespace) -> int:
    """`nsa generate`: text on stdout as it is generated, speeds on stderr."""
    device = usable_device(args.device)
    require_int("--seed", args.seed, at_least=0)
    options = Options(**{field.name: getattr(args, field.name) for field in fields(Options) if field.name != "end"})
    folder = args.run or newest_run()
    model, tokenizer = load_run(folder, device)
    if args.dtype is not None:
        model = model.to(DTYPES[args.dtype])
    prompts = read_prompts(args)
    options = replace(options, end=None if args.ignore_end else tokenizer.end)
    progress = show_prefill if is_terminal(sys.stderr) else None
    how: dict[str, Any] = {"stop_strings": args.stop, "name": f"the model in {folder}", "progress": progress}
    generation = TextGeneration(model, tokenizer, prompts, options, **how)
    rows = OrderedRows(write_out, [""] * len(prompts) if args.hide_prompt else prompts)
    try:
        for pieces in generation:
            rows.add(pieces, generation.finished)
    except KeyboardInterrupt:
        if generation.tokens.stats.new_tokens:
            rows.add(generation.close(), lambda row: True)
        raise
    say(summary(generation.tokens), error=True)
    return 0


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of `--prompt`, `--prompt-file` or `--prompts`, of which at most one is given."""
    if args.prompts is not None:
        lines = read_source(args.prompts, "--prompts").removesuffix("\n").split("\n")
        named = [(f"line {number} of --prompts", line.removesuffix("\r")) for number, line in enumerate(lines, 1)]
    elif args.prompt_file:
        named = [(f"--prompt-file {source}", read_source(source, "--prompt-file")) for source in args.prompt_file]
    else:
        named = [("--prompt", prompt) for prompt in args.prompt or ["def "]]
    for name, prompt in named:
        require_text(name, prompt)
    return [prompt for _, prompt in named]


def require_text(name: str, text: str) -> None:
    """A ValueError for text that is empty or not valid UTF-8."""
    fits = text != "" and text == text.encode(errors="replace").decode()
    require(fits, name, text, "UTF-8 text of at least one character")


def read_source(source: str, flag: str) -> str:
    """The text of a file, or of stdin for `-`."""
    try:
        if source != "-":
            return Path(source).expanduser().read_bytes().decode()
        require(sys.stdin is not None, flag, source, "a file, because stdin is closed")
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} is {source!r}; accepted: UTF-8 text ({error})") from None


def write_out(text: str) -> None:
    """Write to stdout at once; characters that its encoding lacks are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def show_prefill(done: int, total: int) -> None:
    """A progress bar on stderr, which disappears at the end; none for a prompt of one chunk."""
    filled = 30 * done // total
    bar = f"\rprefill [{'#' * filled}{' ' * (30 - filled)}] {done:,}/{total:,} tokens"
    with lossy(sys.stderr):
        print("\r\033[K" if done == total else bar, end="", file=sys.stderr, flush=True)


def summary(generation: Generation) -> str:
    """Tokens per second of prefill and decoding, and the bytes that a decode step reads against dense attention."""

    def took(tokens: int, seconds: float) -> str:
        return f"{tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s"

    s = generation.stats
    lines = [f"prefill: {took(s.prompt_tokens - s.cached_tokens, s.prefill_s)}"]
    if s.cached_tokens:
        lines[0] += f", {s.cached_tokens:,} more from the saved cache"
    if s.warmup_s:
        lines.append(f"warm-up: {took(s.warmup_tokens, s.warmup_s)}, kernels compiled and steps captured")
    if s.decode_s:
        lines.append(f"decode: {took(s.decoded_tokens, s.decode_s)}, {s.steps:,} steps")
        if s.drafted:
            lines[-1] += f", {s.accepted:,} of {s.drafted:,} draft tokens accepted"
    own, dense = generation.kv_bytes_read()
    read = f"{own / MIB:.2f} MiB, dense attention {dense / MIB:.2f} MiB ({own / dense:.0%})"
    return "\n".join([*lines, f"KV read per step at the end: {read}"])
