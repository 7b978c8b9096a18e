"""Text from tokens that arrive one at a time, and stop strings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsa.config import require
from nsa.data.tokenizer import Tokenizer, check_vocabulary
from nsa.generation.decoder import PrefillProgress
from nsa.generation.engine import Generation
from nsa.generation.options import Options
from nsa.model import LM

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

# Some tokenizers drop a space at the start of a text: new tokens are decoded together with the last ones before them.
CONTEXT = 8


class TextGeneration:
    """Generates text; iterating yields the new text of every row after each step.

    Args:
        model, prompts, options, progress: As for `Generation`; the prompts are texts.
        tokenizer: The model's.
        stop_strings: A row ends before the first of them that it generates.
        name: What errors call the model.

    Raises:
        ValueError: A prompt, a stop string or an option is impossible, or the model's vocabulary is too small; while
            iterating, its logits are not finite.
    """

    def __init__(
        self,
        model: LM,
        tokenizer: Tokenizer,
        prompts: Sequence[str],
        options: Options,
        *,
        stop_strings: Sequence[str] = (),
        name: str = "the model",
        progress: PrefillProgress | None = None,
    ) -> None:
        for argument, texts in {"prompts": prompts, "stop_strings": stop_strings}.items():
            # A string is a sequence of strings too, its characters.
            several = isinstance(texts, Sequence) and not isinstance(texts, str)
            require(several and all(isinstance(text, str) for text in texts), argument, texts, "a list of strings")
        check_vocabulary(tokenizer, model.config.vocab_size, name=f"vocab_size of {name}")
        tokens = [tokenizer.encode(prompt) for prompt in prompts]
        self.name = name
        self.streams = [TextStream(tokenizer, prompt, stop_strings) for prompt in tokens]
        self.tokens = Generation(model, tokens, options, progress=progress)

    def __iter__(self) -> Iterator[list[str]]:
        for new in self.tokens:
            pieces = [stream.push(tokens) for stream, tokens in zip(self.streams, new, strict=True)]
            for index, (row, stream) in enumerate(zip(self.tokens.rows, self.streams, strict=True)):
                if row.finish == "nonfinite":
                    where = where_not_finite(self.tokens.model)
                    raise ValueError(f"{self.name} gives logits that are not finite: {where}")
                if stream.stopped:
                    self.tokens.stop(index)
                elif row.finish is not None:
                    pieces[index] += stream.close()
            yield pieces

    def finished(self, row: int) -> bool:
        return self.tokens.rows[row].finish is not None

    def close(self) -> list[str]:
        """The text that each row held back, once generation was interrupted."""
        return [stream.close() for stream in self.streams]


def where_not_finite(model: LM) -> str:
    """The parameters of `model` that are not finite, for an error."""
    names = [name for name, x in model.named_parameters() if not bool(x.isfinite().all())]
    if not names:
        return "its parameters are finite, but the forward pass overflows"
    return f"{len(names)} of its parameters hold NaN or inf, the first is {names[0]}"


class TextStream:
    """The text of one row, handed out as far as later tokens cannot change it: characters of several tokens wait for
    the last of them, and what may become a stop string until it is decided. `prompt`: the tokens before the first new
    one. The text ends before the stop string that is complete first; a ValueError if one is empty."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop_strings: Sequence[str] = ()) -> None:
        require(all(stop_strings), "stop_strings", list(stop_strings), "strings of at least one character")
        self.tokenizer = tokenizer
        self.stop_strings = stop_strings
        self.stopped = False
        # Tokens whose text was handed out, and those that wait.
        self.done = list(prompt[-CONTEXT:])
        self.waiting: list[int] = []
        # Text that may be the beginning of a stop string.
        self.held = ""

    def push(self, tokens: Sequence[int]) -> str:
        """Append `tokens`; returns the text that has become certain, after a stop string nothing more."""
        self.waiting += tokens
        text = self.decode_waiting()
        if text.endswith(INCOMPLETE):
            return ""
        self.done, self.waiting = (self.done + self.waiting)[-CONTEXT:], []
        return self.before_stop(text)

    def close(self) -> str:
        """The rest, once no token follows."""
        text = self.before_stop(self.decode_waiting())
        rest, self.waiting, self.held = text + self.held, [], ""
        return rest

    def decode_waiting(self) -> str:
        before = self.tokenizer.decode(self.done)
        return self.tokenizer.decode([*self.done, *self.waiting])[len(before) :]

    def before_stop(self, text: str) -> str:
        """What can be handed out of the held text and `text`; sets `stopped` at a stop string."""
        if self.stopped:
            return ""
        text = self.held + text
        # The one that is complete first, so that the result does not depend on how the text was cut into pieces.
        found = [(at + len(stop), at) for stop in self.stop_strings if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self.held = True, ""
            return text[: min(found)[1]]
        # The longest beginning of a stop string that the text ends with.
        starts = [stop[:n] for stop in self.stop_strings for n in range(min(len(text), len(stop)) + 1)]
        n_held = max((len(start) for start in starts if text.endswith(start)), default=0)
        self.held = text[len(text) - n_held :]
        return text[: len(text) - n_held]
