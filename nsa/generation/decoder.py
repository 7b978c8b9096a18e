"""The decode step: everything it reads and writes stays on the device at fixed addresses, so that it can be replayed.

A step feeds each row its last token, and with prompt lookup a draft of the next ones, and picks a token at every
position. Draft tokens that equal the picks before them are kept, and so is the first pick after them: up to rounding,
which depends on the number of rows, the tokens that single steps would have picked, for greedy decoding and for
sampling alike, because the random number of each token depends on the row and the token's index alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.cache import save_caches
from nsa.cuda_graph import capture_graph
from nsa.generation.options import Options
from nsa.generation.prompt_cache import load_prompt_cache, model_fingerprint
from nsa.generation.sampling import draws, pick
from nsa.model import LM
from nsa.model.transformer import Cache

# Eager calls before a capture: kernels are compiled and libraries initialized in them.
WARMUP = 2
# Called after each prefill chunk with the prompt columns done and in all.
PrefillProgress = Callable[[int, int], None]


class Replay:
    """Calls `run`, which reads and writes tensors at fixed addresses and waits for nothing; with `capture` it becomes a
    CUDA graph after `WARMUP` calls, and is replayed from then on."""

    def __init__(self, run: Callable[[], None], *, capture: bool) -> None:
        self.run = run
        self.warmup = WARMUP if capture else None
        self.graph: torch.cuda.CUDAGraph | None = None

    @property
    def warm(self) -> bool:
        """Whether the next call neither compiles nor captures."""
        return self.warmup is None or self.graph is not None

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        elif self.warmup is None:
            self.run()
        elif self.warmup > 0:
            self.warmup -= 1
            self.run()
        else:
            # Capturing runs nothing: the replay is this call's step.
            self.graph = capture_graph(self.run)
            self.graph.replay()


def can_capture(model: LM, options: Options) -> bool:
    """Whether decode steps of `model` run in a CUDA graph: that needs static caches, and no reads of device values."""
    return options.cuda_graph and model.head_weight.device.type == "cuda" and not model.config.attn.strict


class Decoder:
    """Caches and sampling state of a batch, its prefill and its decode step, for checked prompts and at most `limits`
    new tokens of each. A ValueError if a layer does not support the kind of cache in `options` (fp8, paged), or the
    saved caches do not match the model and the prompts."""

    def __init__(self, model: LM, prompts: Sequence[Sequence[int]], limits: Sequence[int], options: Options) -> None:
        self.model = model
        self.options = options
        self.device = device = model.head_weight.device
        batch_size = len(prompts)
        lengths = [len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)]
        self.max_len = max(lengths)
        self.captured = can_capture(model, options)
        self.caches, self.n_cached = prompt_caches(model, prompts, lengths, options)
        self.whole_prompts = prompts
        self.prompts, self.mask = pad_left([p[n:] for p, n in zip(prompts, self.n_cached, strict=True)], device)
        # What the next step feeds: the last token of each row and its draft; how many of these are real. Without drafts
        # and with equal limits, all are: rows that ended early are fed until the last one has ended.
        self.width = 1 + options.prompt_lookup
        self.masked = self.width > 1 or min(limits) < max(limits)
        self.tokens = torch.zeros(batch_size, self.width, dtype=torch.long, device=device)
        self.counts = torch.ones(batch_size, dtype=torch.long, device=device)
        # What the last step picked, and how many of these are kept.
        self.picks = torch.zeros_like(self.tokens)
        self.kept = torch.zeros_like(self.counts)
        # Index of each row's next token, and its random numbers.
        self.index = torch.zeros_like(self.counts)
        self.limits = torch.tensor(limits, device=device)
        self.draws = draws(options, batch_size, max(limits), device)
        # `[B, V]` bool: the tokens of each row.
        self.seen = None
        if options.repetition_penalty != 1:
            self.seen = torch.zeros(batch_size, model.config.vocab_size, dtype=torch.bool, device=device)
            for row, prompt in zip(self.seen, prompts, strict=True):
                row[torch.tensor(prompt, device=device)] = True
        self.steps = {w: Replay(partial(self.run, w), capture=self.captured) for w in {1, self.width}}

    def prefill(self, progress: PrefillProgress | None = None) -> None:
        """Process the prompts in chunks and pick every row's first token; `progress(columns done, in all)` is called
        after each chunk, once the device has finished it."""
        n_columns = self.prompts.shape[1]
        # From here on no row is padding.
        n_padded = 0 if self.mask is None else int((~self.mask).sum(dim=1).max())
        for start in range(0, n_columns, self.options.prefill_chunk):
            columns = slice(start, start + self.options.prefill_chunk)
            mask = None if self.mask is None or start >= n_padded else self.mask[:, columns]
            x = self.model.hidden(self.prompts[:, columns], attention_mask=mask, caches=self.caches)
            if progress is not None:
                if x.is_cuda:
                    torch.cuda.synchronize(x.device)
                progress(min(columns.stop, n_columns), n_columns)
        # Only now: a static chunk reads caches to their full capacity, but here the host knows how far prompts reach.
        for cache in self.caches:
            cache.static = self.captured
        if self.options.save_cache is not None:
            fingerprint = model_fingerprint(self.model)
            save_caches(Path(self.options.save_cache), self.caches, tokens=self.whole_prompts, model=fingerprint)
        self.pick(self.model.logits(x[:, -1:]), None)

    def step(self, width: int = 1) -> None:
        """Feed the first `width` columns of `tokens`, 1 or all, and pick the tokens that follow."""
        self.steps[width]()

    def run(self, width: int) -> None:
        counts = self.counts if self.masked else None
        start = self.caches[0].lengths.clone() if width > 1 else None
        x = self.model.hidden(self.tokens[:, :width], counts=counts, caches=self.caches)
        mask = None if counts is None else torch.arange(width, device=self.device) < counts[:, None]
        self.pick(self.model.logits(x), mask)
        if start is not None:
            # Rejected draft tokens are past the end from here on, and stay there until others take their places. Unlike
            # `truncate` this zeroes nothing: drafts are copied from the text, so what is not finite was fed before.
            end = start + self.kept
            for cache in self.caches:
                cache.lengths.copy_(end)

    def pick(self, logits: Tensor, mask: Tensor | None) -> None:
        """Pick a token at every position of `logits [B, T, V]`, and make the kept ones the rows' newest."""
        width = logits.shape[1]
        offset = torch.arange(width, device=self.device)
        draw = None
        if self.options.temperature:
            draw = self.draws.gather(1, (self.index[:, None] + offset).clamp_max(self.draws.shape[1] - 1))
        # Draft tokens are copied from the text, so all of them were seen.
        picked = pick(logits, draw, self.options, None if self.seen is None else self.seen[:, None])
        kept = torch.ones_like(self.kept)
        if mask is not None:
            agree = (picked[:, :-1] == self.tokens[:, 1:width]) & mask[:, 1:]
            # A finished row is fed nothing.
            kept = (1 + agree.cumprod(dim=1).sum(dim=1)).minimum(self.counts)
        last = picked.gather(1, (kept - 1).clamp_min(0)[:, None])
        if self.seen is not None:
            new = picked.where(offset < kept[:, None], last)
            self.seen.scatter_(1, new.clamp_min(0), True)
        self.picks[:, :width] = picked
        self.kept.copy_(kept)
        self.tokens[:, :1] = last.clamp_min(0)
        self.index += kept
        self.counts.copy_(self.index < self.limits)

    def feed(self, drafts: Sequence[Sequence[int] | None]) -> int:
        """Set what the next step feeds after each row's last token, None for a finished row; returns its width."""
        n_draft = self.width - 1
        counts = [0 if draft is None else 1 + len(draft) for draft in drafts]
        self.counts.copy_(self.upload(counts))
        if max(counts) <= 1:
            return 1
        padded = [[*(draft or []), *([0] * (n_draft - len(draft or [])))] for draft in drafts]
        self.tokens[:, 1:] = self.upload(padded)
        return self.width

    def upload(self, values: list[Any]) -> Tensor:
        on_gpu = self.device.type == "cuda"
        return torch.tensor(values, pin_memory=on_gpu).to(self.device, non_blocking=on_gpu)

    def note_longest(self, longest: int) -> None:
        """Tell the caches what the host knows after a step with drafts: no row is longer than `longest`."""
        for cache in self.caches:
            cache.longest = min(cache.longest, longest)


def prompt_caches(
    model: LM, prompts: Sequence[Sequence[int]], lengths: Sequence[int], options: Options
) -> tuple[list[Cache], list[int]]:
    """One cache per layer for rows of up to `lengths` tokens, and how many tokens of each prompt they hold already."""
    # A prompt that continues a saved one may differ from it in a few tokens at its end.
    n_differing = 0 if options.save_cache is None else 32
    form: dict[str, Any] = {"max_rollback": max(1, n_differing, options.prompt_lookup)}
    if options.quantize is not None:
        form["quantize"] = options.quantize
    if options.page_size is not None:
        form |= {"page_size": options.page_size, "n_pages": sum(-(-n // options.page_size) for n in lengths)}
    if options.load_cache is None:
        caches, n_cached = model.new_cache(len(prompts), max(lengths), **form), [0] * len(prompts)
    else:
        caches, n_cached = load_prompt_cache(Path(options.load_cache), model, prompts, max(lengths), **form)
    for cache in caches:
        cache.make_room(lengths)
    return caches, n_cached


def pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Prompts as one `[B, S]` tensor that each of them ends with, and the mask of what is real; None: everything."""
    lengths = [len(prompt) for prompt in prompts]
    width = max(lengths)
    tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    if min(lengths) == width:
        return tokens, None
    first = torch.tensor([width - length for length in lengths], device=device)
    return tokens, torch.arange(width, device=device) >= first[:, None]
