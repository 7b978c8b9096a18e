"""A batch of prompts from prefill to its last token: which rows go on, what each got, and how long it took."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from nsa.generation.decoder import Decoder, PrefillProgress
from nsa.generation.options import Options
from nsa.model import LM

Finish = Literal["length", "end", "stop", "nonfinite"]


class PromptLookup:
    """Proposes what followed the latest earlier occurrence of the last n-gram in `tokens`, the text so far."""

    def __init__(self, tokens: Sequence[int], ngram: int) -> None:
        self.ngram = ngram
        self.tokens: list[int] = []
        # Where the continuation of each n-gram begins, the latest one.
        self.continuations: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            # An n-gram is listed once a token follows it, so that the last one does not find itself.
            if len(self.tokens) >= self.ngram:
                self.continuations[self.last()] = len(self.tokens)
            self.tokens.append(token)

    def last(self) -> tuple[int, ...]:
        return tuple(self.tokens[-self.ngram :])

    def propose(self, n: int) -> list[int]:
        """`n` tokens, or none where the last n-gram did not occur before.

        A copy that reaches the end of the text goes on with what it copied, as in LZ77: a text that repeats itself is
        continued at its period.
        """
        start = self.continuations.get(self.last())
        if start is None:
            return []
        period = len(self.tokens) - start
        return [self.tokens[start + i % period] for i in range(n)]


@dataclass
class GeneratedRow:
    """One sequence: its new tokens so far, and why it ended."""

    n_prompt: int
    limit: int  # most new tokens
    lookup: PromptLookup | None
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None


@dataclass
class Stats:
    """What a generation did and how long it took, so far."""

    prompt_tokens: int
    cached_tokens: int = 0  # of the prompts, from a saved cache
    new_tokens: int = 0
    warmup_tokens: int = 0  # of the first decode steps, in which kernels are compiled and CUDA graphs captured
    decoded_tokens: int = 0  # of the other ones; each row's first token is the prefill's
    steps: int = 0  # decode steps
    drafted: int = 0
    accepted: int = 0  # of the drafted tokens
    prefill_s: float = 0.0
    warmup_s: float = 0.0
    decode_s: float = 0.0

    def count_step(self, n_new: int, seconds: float, *, warm: bool) -> None:
        if warm:
            self.decoded_tokens += n_new
            self.decode_s += seconds
        else:
            self.warmup_tokens += n_new
            self.warmup_s += seconds


class Generation:
    """Generates the tokens after a batch of prompts: iterating runs the prefill, then decode steps until every row has
    ended.

    Args:
        model: The model, on its device.
        prompts: Token ids of each row, of any lengths.
        options: See `Options`.
        progress: Called after each prefill chunk with the prompt columns done and in all.

    Raises:
        ValueError: A prompt is empty, too long or has an unknown token, or an option does not fit the model.
    """

    @torch.inference_mode()
    def __init__(
        self, model: LM, prompts: Sequence[Sequence[int]], options: Options, *, progress: PrefillProgress | None = None
    ) -> None:
        options.check(prompts, model.config.vocab_size)
        self.model, self.options, self.progress = model, options, progress
        max_len = options.max_len or max(map(len, prompts)) + options.max_new_tokens
        self.rows = [
            GeneratedRow(
                len(prompt),
                min(options.max_new_tokens, max_len - len(prompt)),
                PromptLookup(prompt, options.lookup_ngram) if options.prompt_lookup else None,
            )
            for prompt in prompts
        ]
        self.stats = Stats(prompt_tokens=sum(map(len, prompts)))
        self.decoder = Decoder(model, prompts, [row.limit for row in self.rows], options)
        self.stats.cached_tokens = sum(self.decoder.n_cached)

    def stop(self, row: int) -> None:
        self.rows[row].finish = self.rows[row].finish or "stop"

    @property
    def finished(self) -> bool:
        return all(row.finish is not None for row in self.rows)

    @torch.inference_mode()
    def __iter__(self) -> Iterator[list[list[int]]]:
        """Yields, after the prefill and after each step, the new tokens of every row; none for a row that has ended."""
        began = time.perf_counter()
        self.decoder.prefill(self.progress)
        first = HostCopy(self.decoder, 1)
        first.read()
        done = time.perf_counter()
        self.stats.prefill_s = done - began
        for copy in self.steps_with_lookup(first) if self.options.prompt_lookup else self.steps(first):
            new = [self.take(row, tokens) for row, tokens in zip(self.rows, copy.read(), strict=True)]
            n_new = sum(map(len, new))
            self.stats.new_tokens += n_new
            if copy is not first:
                before, done = done, time.perf_counter()
                self.stats.count_step(n_new, done - before, warm=copy.warm)
            yield new

    def steps(self, first: HostCopy) -> Iterator[HostCopy]:
        """One token per row and step. A GPU is kept a step ahead of what the host reads."""
        ahead = 1 if self.decoder.device.type == "cuda" else 0
        copies = deque([first])
        limit = max(row.limit for row in self.rows)
        while not self.finished:
            while len(copies) < 1 + ahead and 1 + self.stats.steps < limit:
                copies.append(self.step(1))
            yield copies.popleft()

    def steps_with_lookup(self, first: HostCopy) -> Iterator[HostCopy]:
        """Draft tokens are verified in the same step, which removes those that it rejects from the caches."""
        yield first
        while not self.finished:
            drafts = [self.draft(row) for row in self.rows]
            # The caches hold all but each row's last token.
            lengths = [row.n_prompt + len(row.tokens) - 1 for row in self.rows]
            copy = self.step(self.decoder.feed(drafts))
            n_kept = [len(tokens) for tokens in copy.read()]
            n_fed = [0 if draft is None else 1 + len(draft) for draft in drafts]
            # A row that has ended may be longer than its tokens.
            ends = zip(lengths, n_kept, n_fed, strict=True)
            self.decoder.note_longest(max(length + n if fed else self.decoder.max_len for length, n, fed in ends))
            self.stats.drafted += sum(n - 1 for n in n_fed if n)
            self.stats.accepted += sum(n - 1 for n in n_kept if n)
            yield copy

    def step(self, width: int) -> HostCopy:
        warm = self.decoder.steps[width].warm
        self.decoder.step(width)
        self.stats.steps += 1
        return HostCopy(self.decoder, width, warm=warm)

    def draft(self, row: GeneratedRow) -> list[int] | None:
        """The tokens proposed for a row, at most as many as it may still get besides the next one; None: it ended."""
        if row.finish is not None or row.lookup is None:
            return None
        return row.lookup.propose(min(self.options.prompt_lookup, row.limit - len(row.tokens) - 1))

    def take(self, row: GeneratedRow, tokens: Sequence[int]) -> list[int]:
        """Append picked tokens to a row until it ends; returns those appended."""
        before = len(row.tokens)
        for token in tokens:
            if row.finish is not None:
                break
            if token < 0:
                row.finish = "nonfinite"
            elif token == self.options.end:
                row.finish = "end"
            else:
                row.tokens.append(token)
                row.finish = "length" if len(row.tokens) == row.limit else None
        new = row.tokens[before:]
        if row.lookup is not None:
            row.lookup.extend(new)
        return new

    def kv_bytes_read(self) -> tuple[int, int]:
        """Bytes of keys and values that the last decode step read, and what dense attention would have read."""
        lengths = [row.n_prompt + max(0, len(row.tokens) - 1) for row in self.rows]
        form: dict[str, Any] = {} if self.options.quantize is None else {"quantize": self.options.quantize}
        own = sum(self.model.kv_bytes_read(length, **form) for length in lengths)
        # A dense model with the same heads.
        layers, attn = self.model.config.n_layers, self.model.config.attn
        per_token = layers * attn.n_kv_groups * (attn.d_k + attn.d_v) * self.model.head_weight.element_size()
        return own, sum(lengths) * per_token


class HostCopy:
    """The kept picks of a step, on their way to the host; reading them waits for that step, not for later ones."""

    def __init__(self, decoder: Decoder, width: int, *, warm: bool = True) -> None:
        self.warm = warm
        on_gpu = decoder.device.type == "cuda"
        # The next step writes to the same tensors. On a GPU, `to` copies to pinned memory here.
        copies = torch.cat([decoder.picks[:, :width], decoder.kept[:, None]], dim=1).to("cpu", non_blocking=on_gpu)
        self.copies = copies
        self.event = torch.cuda.current_stream(decoder.device).record_event() if on_gpu else None

    def read(self) -> list[list[int]]:
        """Token ids of each row; -1 where logits were not finite."""
        if self.event is not None:
            self.event.synchronize()
        return [row[: row[-1]] for row in self.copies.tolist()]
