"""Images in a view."""

from __future__ import annotations

import pytest

from kvsteward.context.images import hashes, image_parts, stale, with_ids
from kvsteward.context.layout import Epoch, Item, View, derive
from kvsteward.context.pipeline import decode_epoch, encode_epoch
from kvsteward.context.tokens import IMAGE_TOKENS


def picture(n=0):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{n:08d}" + "QUJD" * 100}}


def user(text, *pictures):
    return {"role": "user", "content": [{"type": "text", "text": text}, *pictures] if pictures else text}


def said(text="ok"):
    return {"role": "assistant", "content": text}


def pictures(messages):
    return [p for m in messages if isinstance(m["content"], list) for p in m["content"] if p["type"] == "image_url"]


def test_the_same_image_is_sent_once_in_an_epoch(session):
    chat = session(16_384)
    for turn in range(10):
        prepared = chat.say(user(f"Turn {turn}: what is on it?", picture()))
        assert len(pictures(prepared.view.render())) == 1
        if turn:
            assert prepared.view.items[-1].tokens < IMAGE_TOKENS / 4
            assert "again, shown above" in prepared.view.render()[-1]["content"][1]["text"]
        chat.answer(said())


def test_a_view_with_images_only_grows(session):
    chat, before = session(16_384), []
    for turn in range(8):
        shown = chat.say(user(f"Turn {turn}", picture(turn % 3))).view.render()
        assert shown[: len(before)] == before
        before = shown
        chat.answer(said())


def test_forty_turns_with_the_same_image(session):
    chat, epochs = session(4096), 0
    for turn in range(40):
        prepared = chat.say(user(f"Turn {turn}: " + "look at this here please. " * 12, picture()))
        epochs += prepared.epoch is not None
        shown = pictures(prepared.view.render())
        assert shown == [picture()], "once in each epoch, and always there when it was just sent"
        chat.answer(said("noted " * 10))
    assert epochs >= 2


def test_an_image_that_nobody_refers_to_leaves_at_the_next_epoch(session):
    chat = session(4096)
    chat.say(user("What is on this?", picture()))
    chat.answer(said("A cat."))
    name = hashes(user("", picture()))[0][:10]
    while chat.view.epoch.dropped == 0 and not chat.view.epoch.hidden_images:
        chat.say(user("Tell me of the weather. " * 20))
        chat.answer(said("Fine. " * 10))
    assert pictures(chat.view.render()) == []
    assert name in str(chat.view.render()), "its hash stays"


def test_in_the_rounds_that_stay_it_becomes_a_line(session):
    chat = session(6000)
    for _ in range(20):
        chat.say(user("Tell me of the weather. " * 8))
        chat.answer(said("Fine. " * 10))
    chat.say(user("What is on this?", picture()))
    chat.answer(said("A cat."))
    prepared = chat.say(user("Thanks. Now the weather."), force=True)
    assert pictures(prepared.view.render()) == []
    assert "left out here" in str(prepared.view.render())
    assert prepared.view.items[-3].images
    again = chat.say(user("The cat again:", picture()))
    assert pictures(again.view.render()) == [picture()], "sent anew, it is shown"
    assert decode_epoch(encode_epoch(prepared.epoch)) == prepared.epoch


@pytest.mark.parametrize(
    ("newest", "gone"),
    [
        (user("And the weather?"), True),
        (user("What else is in the picture?"), False),
        (user(f"Compare with {hashes(user('', picture()))[0][:10]}"), False),
        (user("This one:", picture()), False),
        (user("This one:", picture(1)), True),
    ],
)
def test_what_counts_as_a_reference(newest, gone):
    messages = [user("look", picture()), said(), newest]
    names = hashes(messages[0])
    assert (names[0] in stale([(m, hashes(m)) for m in messages])) == gone


def test_one_that_is_not_answered_yet_never_leaves():
    assert stale([(m, hashes(m)) for m in [said(), user("look", picture())]]) == ()


def test_a_view_with_images_is_derived_again(session):
    chat, path, epochs = session(4096), [], []
    for turn in range(30):
        prepared = chat.say(user(f"Turn {turn} " + "words " * 30, *([picture(turn // 4)] if turn % 2 else ())))
        path.append(prepared.view.items[-1])
        if prepared.epoch:
            epochs.append((path[-1].hash, decode_epoch(encode_epoch(prepared.epoch))))
        chat.answer(said(f"noted {turn}"))
        path.append(chat.view.items[-1])
    assert epochs
    assert derive(path, epochs, {}).render() == chat.view.render()


def test_web_addresses_are_left_alone():
    part = {"type": "image_url", "image_url": {"url": "https://example.org/now.png"}}
    item = Item("a", 1, user("x", part), 9, 9, hashes(user("x", part)))
    other = Item("b", 2, user("y", part), 9, 9, hashes(user("y", part)))
    assert View((), Epoch(), (item, other)).render() == [item.message, other.message]


def test_ids_are_stable_and_the_clients_own_stay():
    own = {**picture(1), "uuid": "mine"}
    messages = [user("a", picture(), own), user("b")]
    first, second = with_ids(messages)
    assert [p.get("uuid") for p in first["content"]] == [None, hashes(user("", picture()))[0], "mine"]
    assert second is messages[1]
    assert "uuid" not in str(messages[0]["content"][1])


def test_an_image_is_found_by_its_hash():
    message = user("two", picture(1), picture(2))
    assert image_parts(message, hashes(message)[1][:10]) == [picture(2)]
    assert image_parts(message, "ffffffff") == [picture(1), picture(2)]
    assert image_parts(user("none")) == []
