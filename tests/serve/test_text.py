"""Answers as text: every token reads differently, and a stop string ends them wherever it lies."""

from __future__ import annotations

import random

import pytest

from pdstage.demo.serve.text import VOCAB, Growing, encode, syllable


def grow(tokens: list[int], *stop: str) -> tuple[str, bool]:
    text, shown = Growing(stop), ""
    for token in tokens:
        shown += text.add(token)
        if text.stopped:
            return shown + text.end(), True
    return shown + text.end(), False


def test_a_prompt_is_its_bytes():
    assert encode("aé") == [97, 0xC3, 0xA9]


def test_no_two_tokens_read_alike():
    assert len({syllable(token) for token in range(VOCAB)}) == VOCAB


@pytest.mark.parametrize("seed", range(30))
def test_stop_strings_cut_as_they_would_the_whole(seed):
    """Against the plain definition: the answer is the whole text up to where a stop string first came to its end."""
    draw = random.Random(seed)
    tokens = [draw.choice([0, 1, 16, 256]) for _ in range(30)]
    whole = "".join(map(syllable, tokens))
    at = draw.randrange(len(whole) - 4)
    stop = (whole[at : at + draw.randint(1, 5)], "never", whole[-1] + "!")
    ends = [n for n in range(1, 31) if any(s in "".join(map(syllable, tokens[:n])) for s in stop)]
    upto = "".join(map(syllable, tokens[: ends[0]]))
    assert grow(tokens, *stop) == (upto[: min(upto.index(s) for s in stop if s in upto)], True)


def test_nothing_is_shown_that_a_stop_string_might_take_back():
    text = Growing(("bab!",))
    assert [text.add(0), text.add(0), text.end()] == ["", "ba", "ba"]
