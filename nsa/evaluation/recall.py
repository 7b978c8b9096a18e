"""Needle maps and recall: prompts with notes in a haystack, and whether the model continues the question rightly.

A prompt and its answer have exactly as many tokens as the cell's length. Greedy decoding gives the answer if and only
if every token of it is the most likely one after those before it, so one forward pass scores an answer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.config import require, require_positive_int
from nsa.data.documents import standard_library
from nsa.data.recall import NOTE_KEYS, NOTE_VALUES, Chain, make_chains
from nsa.data.tokenizer import Tokenizer
from nsa.evaluation.forward import EvalModel, hidden_chunks

# Notes that the question is not about, in a multi-hop prompt.
DISTRACTORS = 4


class Cell(NamedTuple):
    """A cell of a map: one question in prompts of one length."""

    # "needle", "keys" (multi-key) or "hops" (multi-hop).
    task: str
    length: int
    # Of a needle, its depth from 0 to 1; else the number of keys or hops.
    value: float


@dataclass(frozen=True)
class Score:
    """The score over all prompts of a cell."""

    cell: Cell
    # Fraction of the answers that are right from the first token to the last.
    accuracy: float
    # Mean loss of the answers' tokens.
    loss: float
    samples: int


class Haystack:
    """Tokens of text, long enough to cut a prompt's filler from any place.

    Args:
        tokenizer: The model's.
        texts: Documents; they are concatenated.
        n_tokens: How many tokens to keep, at least.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Iterator[str], n_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        for text in texts:
            self.tokens += tokenizer.encode(text)
            if len(self.tokens) >= n_tokens:
                break
        require(len(self.tokens) > 0, "the haystack", "0 tokens", "text of at least one token")
        # A short text is repeated.
        self.tokens *= max(1, -(-n_tokens // len(self.tokens)))
        ends_line = {token: tokenizer.decode([token]).startswith("\n") for token in set(self.tokens)}
        ends = [at for at, token in enumerate(self.tokens) if ends_line[token]]
        # Where lines end; a text of one line is cut anywhere.
        self.ends: Sequence[int] = ends or range(len(self.tokens))

    def prompt(
        self, rng: Random, notes: Sequence[tuple[float, str]], asked: Chain, length: int
    ) -> tuple[list[int], int]:
        """A prompt with its answer: filler with notes between its lines, then the question. The tokens are those of a
        training document (`nsa.data.recall`).

        Args:
            rng: Decides where the filler is from.
            notes: Lines and where they go, as a fraction of the filler; each follows the line that ends there next.
            asked: The question.
            length: Tokens in all.

        Returns:
            The tokens, and how many of the last ones are the answer.

        Raises:
            ValueError: The notes and the question do not fit into `length`.
        """
        encode = self.tokenizer.encode
        lines = [(place, encode(f"\n{line}")) for place, line in sorted(notes)]
        question, answer = encode(f"\n{asked.question}"), encode(asked.answer)
        room = length - sum(len(line) for _, line in lines) - len(question) - len(answer)
        require(room >= 0, "length", length, f"at least {length - room} tokens, which the notes and the question take")
        end = rng.choice(self.ends[bisect_left(self.ends, room) :] or [len(self.tokens)])
        tokens: list[int] = []
        last = end - room
        for place, line in lines:
            after = bisect_left(self.ends, end - room + round(place * room))
            cut = min(end, self.ends[after]) if after < len(self.ends) else end
            tokens += self.tokens[last:cut] + line
            last = cut
        return tokens + self.tokens[last:end] + question + answer, len(answer)


def library_texts() -> Iterator[str]:
    """The default haystack: the source of Python's standard library, always in the same shuffled order."""
    for chunk in standard_library().chunks(0, 0, 0, None):
        yield from chunk.texts


def cell_prompt(haystack: Haystack, cell: Cell, sample: int) -> tuple[list[int], int]:
    """Prompt number `sample` of a cell, and the length of its answer; the same for every model with that tokenizer."""
    rng = Random(f"{cell.task}-{cell.length}-{cell.value}-{sample}")
    if cell.task == "needle":
        (asked,) = chains = make_chains(rng, [1])
    elif cell.task == "keys":
        asked, *_ = chains = make_chains(rng, [1] * int(cell.value))
    else:
        asked, *_ = chains = make_chains(rng, [int(cell.value)] + [1] * DISTRACTORS)
    depth: Callable[[], float] = (lambda: cell.value) if cell.task == "needle" else rng.random
    notes = [(depth(), note) for chain in chains for note in chain.notes]
    return haystack.prompt(rng, notes, asked, cell.length)


@torch.inference_mode()
def score_answers(subject: EvalModel, tokens: Tensor, n_answer: Sequence[int]) -> tuple[Tensor, Tensor]:
    """bool `[B]` and fp32 `[B]`, on the CPU: whether greedy decoding gives each row's answer, and the answer's loss.

    `tokens [B, S]` are prompts that end with their answers, the last `n_answer` tokens of each row.
    """
    tokens = tokens.to(subject.device)
    longest = max(n_answer)
    tail: Tensor | None = None
    for _, x in hidden_chunks(subject, tokens):
        tail = (x if tail is None else torch.cat([tail, x], dim=1))[:, -(longest + 1) :]
    assert tail is not None
    logp = subject.model.logits(tail[:, :-1].to(subject.model.head_weight.dtype)).float().log_softmax(dim=-1).cpu()
    answers = tokens[:, -longest:].cpu()
    scored = torch.arange(longest) >= longest - torch.tensor(n_answer)[:, None]
    right = (logp.argmax(dim=-1) == answers) | ~scored
    losses = -logp.gather(-1, answers[..., None])[..., 0].where(scored, 0.0)
    return right.all(dim=1), losses.sum(dim=1) / scored.sum(dim=1)


def evaluate_cells(
    subject: EvalModel,
    cells: Sequence[Cell],
    *,
    samples: int,
    texts: Callable[[], Iterator[str]] = library_texts,
    progress: Callable[[Score], None] = lambda score: None,
) -> list[Score]:
    """Score every cell.

    Args:
        subject: The model.
        cells: What to ask.
        samples: Prompts per cell.
        texts: Gives the documents of the haystack.
        progress: Called with each score as it is known.

    Returns:
        The scores, in the order of `cells`.

    Raises:
        ValueError: A cell is impossible.
    """
    check_cells(subject.tokenizer, cells, samples)
    # Twice the longest prompt: no two fillers need be the same.
    haystack = Haystack(subject.tokenizer, texts(), 2 * max(cell.length for cell in cells))
    scores = []
    for cell in cells:
        prompts = [cell_prompt(haystack, cell, sample) for sample in range(samples)]
        rows = max(1, subject.chunk // cell.length)
        right, losses = [], []
        for begin in range(0, samples, rows):
            batch, n_answer = zip(*prompts[begin : begin + rows], strict=True)
            found = score_answers(subject, torch.tensor(batch), n_answer)
            right.append(found[0])
            losses.append(found[1])
        accuracy = torch.cat(right).float().mean().item()
        scores.append(Score(cell, accuracy, torch.cat(losses).mean().item(), samples))
        progress(scores[-1])
    return scores


def check_cells(tokenizer: Tokenizer, cells: Sequence[Cell], samples: int) -> None:
    """`ValueError` unless every cell is possible, and each of its prompts has room for its notes and its question."""
    require_positive_int("samples", samples)
    for cell in cells:
        check_cell(cell)
    haystack = Haystack(tokenizer, iter(["x\n"]), max(cell.length for cell in cells))
    for cell, sample in product(cells, range(samples)):
        cell_prompt(haystack, cell, sample)


def check_cell(cell: Cell) -> None:
    require(cell.task in ("needle", "keys", "hops"), "task", cell.task, "'needle', 'keys' or 'hops'")
    require_positive_int("length", cell.length)
    if cell.task == "needle":
        require(0 <= cell.value <= 1, "depth", cell.value, "a fraction from 0 to 1")
    else:
        require_positive_int(cell.task, int(cell.value))
        most = len(NOTE_VALUES) if cell.task == "keys" else len(NOTE_KEYS) - DISTRACTORS
        require(cell.value <= most, cell.task, int(cell.value), f"at most {most}")
