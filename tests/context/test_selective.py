"""Sentences chosen by what a model tells of their tokens. The log-probabilities are given here."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.context.marks import Policy
from kvsteward.context.selective import MAX_WINDOWS, WINDOW_TOKENS, Score, Selected, applies_to, select
from kvsteward.context.tokens import Estimator
from kvsteward.errors import ConfigError

DULL = "The water flows down to the sea as it always does, and people walk along it."
TELLING = "Pump 7 of hall KX-4711 failed at 09:41 with code E-773."
TEXT = " ".join([DULL, DULL, TELLING, DULL, DULL])
DULL_LOGPROB, TELLING_LOGPROB = -0.5, -6.0


def pieces(question: Score, telling: tuple[str, ...] = (TELLING,), mark: str = "") -> list[tuple[str, float | None]]:
    """A tokenizer of words, and a model that is surprised by the sentences in `telling`."""
    whole = question.before + question.text
    spots = [(whole.find(t), whole.find(t) + len(t)) for t in telling if t in whole]
    found: list[tuple[str, float | None]] = [(mark, None)] if mark else []
    for match in re.finditer(r"\s*\S+|\s+", whole):
        at = match.start() + len(match.group()) - len(match.group().lstrip())
        inside = any(start <= at < end for start, end in spots)
        found.append((match.group(), (TELLING_LOGPROB if inside else DULL_LOGPROB) if found else None))
    return found


def chosen(text: str = TEXT, answer: Any = pieces, **changes: Any) -> tuple[Selected | None, list[Score]]:
    """What is selected, and what was asked."""
    options = {"question": "What failed?", "mentions": frozenset[str](), "ratio": 0.5, "room_tokens": 10_000}
    questions = select(text, estimator=Estimator(), **{**options, **changes})
    asked: list[Score] = []
    reply = None
    while True:
        try:
            question = questions.send(reply)
        except StopIteration as stop:
            return stop.value, asked
        asked.append(question)
        reply = answer(question)


def test_what_tells_most_is_kept_word_for_word_and_in_order():
    found, asked = chosen(ratio=0.55)
    assert found is not None
    assert found.text == f"[…] {DULL} {TELLING} […]"
    assert (found.kept, found.sentences) == (2, 5)
    assert found.note == "the 2 of 5 sentences that tell most"
    assert asked == [Score("What failed?\n\n", TEXT)]
    assert found.asked_tokens == Estimator().text(asked[0].before) + Estimator().text(TEXT)


def test_the_smaller_of_share_and_room_counts():
    estimator = Estimator()
    for ratio, room in ((0.35, 10_000), (0.9, 38)):
        found, _ = chosen(ratio=ratio, room_tokens=room)
        assert found is not None
        assert TELLING in found.text
        assert estimator.text(found.text) <= min(room, 0.35 * estimator.text(TEXT) + 12)
        assert found.kept == 1


def test_a_sentence_that_names_what_is_asked_for_comes_first():
    wanted = "The people of Oakvale walk along it."
    text = " ".join([DULL, wanted, DULL, TELLING, DULL])
    found, _ = chosen(text, mentions=frozenset({"Oakvale", "it"}), ratio=0.2)
    assert found is not None
    assert wanted in found.text
    assert TELLING not in found.text


def test_long_texts_are_asked_about_in_windows():
    text = " ".join([*[DULL] * 80, TELLING, *[DULL] * 80])
    found, asked = chosen(text, ratio=0.1)
    assert found is not None
    assert TELLING in found.text
    assert len(asked) > 1
    assert "".join(q.text for q in asked) == text
    assert all(Estimator().text(q.text) <= WINDOW_TOKENS + 40 for q in asked)
    enormous = f"{DULL} " * (MAX_WINDOWS * WINDOW_TOKENS // 10)
    assert chosen(enormous) == (None, [])


def test_a_tokenizers_own_mark_at_the_beginning_is_no_text():
    assert chosen(answer=lambda q: pieces(q, mark="<s>"))[0] == chosen()[0]


def test_characters_in_several_tokens():
    text = TEXT.replace("water", "wäter").replace("sea", "🌊 sea")

    def cut(question: Score) -> list[tuple[str, float | None]]:
        found: list[tuple[str, float | None]] = []
        for piece, logprob in pieces(question):
            parts = re.split("(ä|🌊)", piece)
            for part in parts:
                broken = part in {"ä", "🌊"}
                found += [("\ufffd", logprob)] * len(part.encode()) if broken else [(part, logprob)] if part else []
        return found

    found, _ = chosen(text, answer=cut, ratio=0.3)
    assert found is not None
    assert TELLING in found.text


@pytest.mark.parametrize(
    "answer",
    [
        lambda q: None,
        lambda q: [],
        lambda q: [("another", None), (" text", -1.0)],
        lambda q: pieces(q)[:-6],
        lambda q: [("\ufffd", -1.0)] * 400,
    ],
    ids=["refused", "empty", "another text", "cut", "broken"],
)
def test_an_answer_that_is_not_of_this_text_is_not_used(answer):
    assert chosen(answer=answer)[0] is None


def test_what_has_nothing_to_leave_out_is_left_alone():
    assert chosen("One sentence only, and no more.")[0] is None
    assert chosen(ratio=0.99, text=" ".join([DULL, TELLING, "Ok."]), room_tokens=4)[0] is None


def test_it_is_for_prose():
    assert applies_to(" ".join([DULL] * 20))
    assert not applies_to("\n".join(f'{{"id": {n}, "name": "x{n}"}}' for n in range(200)))
    assert not applies_to("\n".join(f"2026-03-04 10:00:{n:02d} ERROR job {n} failed" for n in range(60)))


@given(
    st.lists(st.sampled_from([DULL, TELLING, "It rains.", "Is it? Yes!", "Über 3 Öfen."]), max_size=30),
    st.floats(0.05, 0.95),
)
def test_whatever_the_text_what_is_kept_stands_in_it(sentences, ratio):
    text = "  ".join(sentences)
    found, _ = chosen(text, ratio=ratio)
    if found is not None:
        assert Estimator().text(found.text) <= ratio * Estimator().text(text) + 16 + len(sentences)
        for part in found.text.split("[…]"):
            assert part.strip() in text


@pytest.mark.parametrize("selective", [0.0, 1.0, -0.2, 3.0])
def test_a_share_outside_of_0_to_1_is_refused(selective):
    with pytest.raises(ConfigError, match="selective"):
        Policy(selective=selective)
