"""Drafts by prompt lookup, and text that is handed out while tokens arrive."""

from __future__ import annotations

import pytest
from corpora import TEXTS, needs_tokenizers
from hypothesis import given
from hypothesis import strategies as st

from nsa.data import train_bpe
from nsa.data.tokenizer import ByteTokenizer
from nsa.generation.engine import PromptLookup
from nsa.generation.text import TextStream


def proposed_by_definition(tokens: list[int], ngram: int, n: int) -> list[int]:
    """Search backwards for the last n-gram, then copy from behind it, copied tokens included."""
    last = tokens[-ngram:]
    for start in range(len(tokens) - 1, ngram - 1, -1):
        if tokens[start - ngram : start] == last:
            grown = list(tokens)
            for i in range(n):
                grown.append(grown[start + i])
            return grown[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 4), st.integers(0, 9), st.data())
def test_lookup_proposes_what_followed_the_latest_occurrence(
    tokens: list[int], ngram: int, n: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(tokens)))
    lookup = PromptLookup(tokens[:cut], ngram)
    lookup.extend(tokens[cut:])
    assert lookup.propose(n) == proposed_by_definition(tokens, ngram, n)


def pieces_of(text: str, cuts: list[int], stops: list[str]) -> tuple[str, bool]:
    """All that a stream hands out of the bytes of `text`, pushed in groups of `cuts` bytes."""
    tokens = list(text.encode())
    stream = TextStream(ByteTokenizer(), stop_strings=stops)
    handed_out, sizes = "", [*cuts, *[1] * len(tokens)]
    while tokens and not stream.stopped:
        size = sizes.pop(0)
        handed_out += stream.push(tokens[:size])
        assert text.startswith(handed_out), "text that was handed out is final"
        tokens = tokens[size:]
    return handed_out + stream.close(), stream.stopped


CUTS = st.lists(st.integers(1, 5), max_size=10)


@given(st.text("aé€😀 ", max_size=20), CUTS)
def test_pieces_add_up_to_the_text(text: str, cuts: list[int]) -> None:
    assert pieces_of(text, cuts, []) == (text, False)


@given(st.text("abc€", max_size=20), CUTS, st.lists(st.text("abc€", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_stop_string_completed_first(text: str, cuts: list[int], stops: list[str]) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    assert pieces_of(text, cuts, stops) == (expected, bool(ends))


def test_bytes_that_are_no_text_are_shown_in_the_end() -> None:
    stream = TextStream(ByteTokenizer())
    tokens = [0x61, 0xFF, 0xE2, 0x82]
    handed_out = "".join(stream.push([token]) for token in tokens)
    assert handed_out == "a"
    assert handed_out + stream.close() == ByteTokenizer().decode(tokens)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop_strings is"):
        TextStream(ByteTokenizer(), stop_strings=["a", ""])


@needs_tokenizers
def test_pieces_of_a_bpe_add_up_to_the_text() -> None:
    tokenizer = train_bpe(TEXTS, 300)
    prompt, text = "document", " 07: ääh hh 😀 documents"
    stream = TextStream(tokenizer, tokenizer.encode(prompt))
    pieces = [stream.push([token]) for token in tokenizer.encode(text)]
    assert "".join(pieces) + stream.close() == text
    assert len(set(pieces)) > 5
