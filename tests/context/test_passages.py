"""Passages: what an embedding model is given of a text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvsteward.context.passages import MAX_PASSAGES, MIN_TOKENS, PASSAGE_TOKENS, passages
from kvsteward.context.tokens import Estimator

TEXTS = st.lists(
    st.one_of(st.text(max_size=400), st.integers(1, 3000).map("9".__mul__), st.integers(1, 3000).map("word ".__mul__)),
    max_size=12,
).map("\n".join)


def letters(text):
    return "".join(text.split())


@given(TEXTS)
def test_passages_fit_and_lose_nothing(text):
    found = passages(text)
    assert all(part.strip() and Estimator().text(part) <= PASSAGE_TOKENS for part in found)
    assert len(found) <= MAX_PASSAGES
    if Estimator().text(text.strip()) < MIN_TOKENS:
        assert found == [] or len(text) >= 1000
    elif len(found) < MAX_PASSAGES:
        assert letters("".join(found)) == letters(text)


def test_a_short_text_is_one_passage():
    assert passages("one line\n\n  two lines  ") == ["one line\ntwo lines"]
    assert passages(" \n\t") == []
    assert passages("ok") == passages("Done.") == []


def test_a_line_is_cut_after_a_sentence():
    sentence = "The vault was opened by the guard in the morning. "
    first, *_ = passages(sentence * 40)
    assert first.endswith("morning.")


def test_of_a_huge_text_the_first_and_the_last_passages_stay():
    found = passages("BEGIN\n" + "a plain line of text\n" * 100_000 + "END")
    assert len(found) == MAX_PASSAGES
    assert found[0].startswith("BEGIN")
    assert found[-1].endswith("END")
