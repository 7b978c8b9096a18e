"""Generate text with a trained model: one pass over the prompts, then token by token from the caches.

nsa generate --run runs/tiny-nsa --prompt "def main(" --max-new-tokens 200 --temperature 0.8
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nsa.config import require, require_int, require_positive_int
from nsa.data.tokenizer import FILE, Tokenizer, check_vocabulary, load_tokenizer
from nsa.machine import usable_device
from nsa.model import LM, load_model
from nsa.train.run_folder import RUNS

# Below it, logits over the temperature may overflow in fp32.
MIN_TEMPERATURE = 1e-6


@torch.inference_mode()
def generate(
    model: LM,
    prompts: Tensor | Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Tensor:
    """Continue prompts. Nothing is read back on the way, so the GPU never waits.

    Args:
        model: the model.
        prompts: a tensor `[B, S]`, or B lists of any lengths.
        max_new_tokens: tokens to generate.
        temperature: 0 takes the most likely token.
        top_k: sample among that many.
        generator: for sampling.
        stop: called after each token; once it returns True the tokens so far are returned.

    Returns:
        `[B, n]` tokens, n <= max_new_tokens. A row whose logits are not finite gets -1 from there on.

    Raises:
        ValueError: an argument is out of range.
    """
    require_positive_int("max_new_tokens", max_new_tokens)
    require(
        temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf,
        "temperature",
        temperature,
        f"0 for the most likely token, or a finite number of at least {MIN_TEMPERATURE}",
    )
    require(
        top_k is None or 1 <= top_k <= model.config.vocab_size,
        "top_k",
        top_k,
        f"None or 1 to {model.config.vocab_size}",
    )
    tokens, mask = pad_left(prompts, model.head_weight.device)
    caches = model.new_cache(len(tokens), tokens.shape[1] + max_new_tokens)
    # With the padding on the left every prompt ends in the last column.
    x = model.hidden(tokens, attention_mask=mask, caches=caches)[:, -1:]
    new = [pick(model.logits(x)[:, -1], temperature, top_k, generator)]
    while len(new) < max_new_tokens and not stop():
        x = model.hidden(new[-1].clamp_min(0), caches=caches)
        new.append(pick(model.logits(x)[:, -1], temperature, top_k, generator))
    return torch.cat(new, dim=1)


def pad_left(prompts: Tensor | Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Prompts as one `[B, S]` tensor, and the mask of its real tokens; None where all are."""
    if isinstance(prompts, Tensor):
        require(prompts.dim() == 2, "prompts.shape", tuple(prompts.shape), "two dimensions [B, S]")
        return prompts.to(device), None
    lengths = [len(prompt) for prompt in prompts]
    require(bool(lengths) and min(lengths) >= 1, "prompts", lengths, "at least one prompt, of at least one token each")
    width = max(lengths)
    tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    if min(lengths) == width:
        return tokens, None
    first = torch.tensor([width - length for length in lengths], device=device)
    return tokens, torch.arange(width, device=device) >= first[:, None]


def pick(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """`[B, V]` logits to `[B, 1]` tokens; -1 for a row that is not finite."""
    finite = logits.isfinite().all(dim=-1, keepdim=True)
    # Sampling from NaN is an error that would end the process on a GPU.
    logits = logits.where(finite, 0.0)
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True).where(finite, -1)
    if top_k is not None:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probabilities = (logits.float() / temperature).softmax(dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator).where(finite, -1)


def newest_run(runs: Path = RUNS) -> Path:
    found = sorted(runs.glob("*/model.json"), key=lambda path: path.stat().st_mtime)
    require(bool(found), "--run", f"not given, and {runs}/ has no trained model", "a folder that `nsa train` wrote")
    return found[-1].parent


def tokenizer_of(run: Path) -> Tokenizer:
    """The tokenizer of a run; bytes where the model was saved without one."""
    return load_tokenizer(run if (run / FILE).is_file() else "bytes")


def run(args: argparse.Namespace) -> int:
    device = usable_device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    require_int("--seed", args.seed, at_least=0)
    folder = args.run or newest_run()
    model, tokenizer = load_model(folder, device), tokenizer_of(folder)
    check_vocabulary(tokenizer, model.config.vocab_size, name=f"vocab_size of the model in {folder}")
    prompts = args.prompt or ["def "]
    for prompt in prompts:
        text = prompt != "" and prompt == prompt.encode(errors="replace").decode()
        require(text, "--prompt", prompt, "UTF-8 text of at least one character")
    generator = torch.Generator(device).manual_seed(args.seed)
    new = generate(
        model,
        [tokenizer.encode(prompt) for prompt in prompts],
        args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        generator=generator,
    )
    if bool((new < 0).any()):
        raise ValueError(f"the model in {folder} gives logits that are not finite: {where_not_finite(model)}")
    for prompt, tokens in zip(prompts, new.tolist(), strict=True):
        print(prompt + tokenizer.decode(tokens))
    return 0


def where_not_finite(model: LM) -> str:
    names = [name for name, x in model.named_parameters() if not bool(x.isfinite().all())]
    if not names:
        return "its parameters are finite, but the forward pass overflows"
    return f"{len(names)} of its parameters hold NaN or inf, the first is {names[0]}"
