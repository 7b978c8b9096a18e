"""Prompt lookup: drafts for speculative decoding, copied from the text so far."""

from __future__ import annotations

from collections.abc import Sequence


class PromptLookup:
    """Proposes what followed the latest earlier occurrence of a text's last n-gram.

    Args:
        tokens: The text so far.
        ngram: Length of the n-gram in tokens.
    """

    def __init__(self, tokens: Sequence[int], ngram: int) -> None:
        self.ngram = ngram
        self.tokens: list[int] = []
        # Where the continuation of each n-gram begins, the latest one.
        self.continuations: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the text."""
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
