"""What changes leaves the front of the prompt, is told where it matters, and can be put back."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsteward.context.hygiene import (
    RULES,
    Hygiene,
    Rule,
    canonical_tools,
    clean,
    meaning_of,
    note_of,
    restored,
    same_tools,
    volatile,
)
from kvsteward.errors import ConfigError

ON = Hygiene()
AGENT = "You are a coding agent.\nRead before you write.\n"


def system(text: Any) -> dict[str, Any]:
    return {"role": "system", "content": text}


def tool(name: str, description: str = "Does it.", **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {"path": {"type": "string"}}, "required": []}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


VOLATILE = [
    ("x-anthropic-billing-header: cc_version=2.1.37.fa5; cc_entrypoint=cli; cch=0a3f1;", "billing"),
    ("Request ID: req_01J9ZK3N7Q", "request id"),
    ("trace-id=4bf92f3577b34da6a3ce929d0e0e4736", "request id"),
    ("Session ID: 5f3c9a1e-77aa", "session id"),
    ("Working directory: /home/ada/project", "working directory"),
    ("cwd: /srv/app", "working directory"),
    ("Today's date: 2026-11-29", "date or time"),
    ("Current time: 18:03:07", "date or time"),
    ("The current date and time is Sunday, November 29, 2026 6:03 PM.", "date or time"),
    ("Today is 29 November 2026.", "date or time"),
    ("Now: 1790000000", "date or time"),
    ("2026-11-29T18:03:07.123Z", "date or time"),
    ("- timestamp: 2026-11-29 18:03", "date or time"),
    ("You run on v1.2 and the current date is 2026-11-29.", "date or time"),
    ("Current date/time (UTC): 2026-11-29 18:03", "date or time"),
    ("Local time in Berlin is 18:03.", "date or time"),
    ("It is Sunday, Nov. 29, 2026.", "date or time"),
]
STEADY = [
    "Use the tool current_time to learn the date, at most 3 times.",
    "Dates are written as YYYY-MM-DD.",
    "The contract was signed on 2019-04-01.",
    "Answer in at most 5 sentences.",
    "If the user asks for the current date, say that you do not know it.",
    "Every request has an id, see the documentation.",
    "The working directory must never be deleted.",
    "Order ids look like #W1234567.",
    "If it is after 18:00, say that the shop is closed.",
    "When the current time is later than 18:00, refuse.",
    "Refuse if the current date is past 2026-01-01.",
    "The local time of a flight is printed as 18:05 in its row, before its name, when it is known at 12:00.",
]


@pytest.mark.parametrize(("line", "rule"), VOLATILE, ids=[line[:30] for line, _ in VOLATILE])
def test_a_volatile_line_is_taken_out_whole(line, rule):
    cleaned = clean([system(f"{AGENT}{line}\nBe brief.")], None, ON)
    assert cleaned.messages == (system(f"{AGENT}Be brief."),)
    assert [(m.rule, m.text, m.at) for m in cleaned.moved] == [(rule, f"{line}\n", len(AGENT))]


@pytest.mark.parametrize("line", STEADY)
def test_what_does_not_change_stays(line):
    given_ = [system(f"{AGENT}{line}\nBe brief.")]
    cleaned = clean(given_, None, ON)
    assert cleaned.moved == ()
    assert cleaned.messages[0] is given_[0]


def test_of_a_long_line_only_the_sentence_goes():
    before, after = "You help people with their taxes. " * 10, "Always be polite to all of them."
    cleaned = clean([system(f"{before}The current date is 2026-11-29. {after}")], None, ON)
    assert cleaned.messages[0]["content"] == before + after
    assert cleaned.moved[0].text == "The current date is 2026-11-29. "


def test_blocks_go_as_a_whole():
    env = "<env>\nWorking directory: /src\nIs directory a git repo: Yes\nToday's date: 2026-11-29\n</env>\n"
    git = "gitStatus: taken at the start\n\nCurrent branch: main\n\nStatus:\n M src/a.py\n?? b.txt\n\nRecent commits:\n1a2b3c4 Fix it\n"
    cleaned = clean([system(f"{AGENT}{env}Be brief.\n{git}# Style\nWrite prose.")], None, ON)
    assert cleaned.messages[0]["content"] == f"{AGENT}Be brief.\n# Style\nWrite prose."
    assert [(m.rule, m.text) for m in cleaned.moved] == [("environment", env), ("git status", git)]


def test_a_block_that_does_not_end_is_not_swallowed():
    text = "<env>\n" + "Keep this rule.\n" * 300
    cleaned = clean([system(text)], None, ON)
    assert cleaned.messages[0]["content"] == "Keep this rule.\n" * 300


def test_only_leading_system_messages_are_cleaned():
    talk = [{"role": "user", "content": "Today is 2026-11-29."}, system("Today is 2026-11-30.")]
    assert clean(talk, None, ON).messages == tuple(talk)


def test_parts_and_descriptions():
    billing = "x-anthropic-billing-header: cch=12ab3;"
    message = system([{"type": "text", "text": billing}, {"type": "text", "text": AGENT}])
    described = tool("run", "Runs it.\nToday's date: 2026-11-29")
    cleaned = clean([message], [described], ON)
    assert cleaned.messages[0]["content"] == [{"type": "text", "text": ""}, {"type": "text", "text": AGENT}]
    assert cleaned.tools[0]["function"]["description"] == "Runs it.\n"
    assert [m.where for m in cleaned.moved] == ["messages[0][0]", "tools[run]"]
    assert restored(cleaned.messages, cleaned.tools, cleaned.moved) == ((message,), [described])


def test_a_note_has_what_matters_and_what_is_new():
    first = clean(
        [system("x-anthropic-billing-header: cch=12ab3;\nToday's date: 2026-11-29\ncwd: /a\nHi")], None, ON
    ).moved
    second = clean(
        [system("x-anthropic-billing-header: cch=99ab3;\nToday's date: 2026-11-30\ncwd: /a\nHi")], None, ON
    ).moved
    assert note_of(first).splitlines()[1:] == ["Today's date: 2026-11-29", "cwd: /a"]
    assert note_of(second, first).splitlines()[1:] == ["Today's date: 2026-11-30"]
    assert note_of(first, first) == ""


def test_rules_of_a_deployment():
    hygiene = Hygiene(rules=(Rule("build", r"^build \d+"), Rule("box", r"^<box>", until=r"</box>", note=False)))
    cleaned = clean([system("build 7\nToday is 2026-11-29.\n<box>\na\n</box>\nend")], None, hygiene)
    assert cleaned.messages[0]["content"] == "Today is 2026-11-29.\nend"
    assert note_of(cleaned.moved).splitlines()[1:] == ["build 7"]
    assert clean([system("build 7")], None, Hygiene(enabled=False, rules=hygiene.rules)).moved == ()
    with pytest.raises(ConfigError, match=r"hygiene.rules.bad.match"):
        Rule("bad", "(")
    with pytest.raises(ConfigError, match="empty line"):
        Rule("all", ".*")


# -- tools ----------------------------------------------------------------------------------------------------------


def test_tools_have_one_order_and_one_order_of_keys():
    shuffled = {
        "function": {"parameters": {"required": [], "properties": {"b": {}, "a": {}}, "type": "object"}, "name": "z"},
        "type": "function",
    }
    (first, second) = canonical_tools([shuffled, tool("a")])
    assert [t["function"]["name"] for t in (first, second)] == ["a", "z"]
    assert list(second) == ["type", "function"]
    assert list(second["function"]) == ["name", "parameters"]
    assert list(second["function"]["parameters"]) == ["type", "properties", "required"]
    assert list(second["function"]["parameters"]["properties"]) == ["b", "a"], (
        "a model fills them in the author's order"
    )


def test_tools_of_the_same_meaning_are_shown_as_they_were():
    known = canonical_tools([tool("f", b={"type": "string"}, a={"type": "string"})])
    shuffled = canonical_tools([tool("f", a={"type": "string"}, b={"type": "string"})])
    assert orjson.dumps(shuffled) != orjson.dumps(known)
    assert same_tools(known, shuffled) is known
    other = canonical_tools([tool("g")])
    assert same_tools(known, other) is other
    assert same_tools(known, None) is None
    assert same_tools(None, other) is other


@pytest.mark.parametrize("odd", [None, "x", 7, {"a": 1}, [1, 2], [{}], [{"type": "function"}], [{"function": "f"}]])
def test_what_is_no_list_of_tools_stays(odd):
    cleaned = clean([system(AGENT)], odd, ON)
    assert cleaned.tools == odd


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)


@given(properties=st.dictionaries(st.text(min_size=1, max_size=6), _JSON, max_size=4), order=st.randoms())
def test_canonical_tools_mean_the_same(properties, order):
    tools = [tool(name, **properties) for name in ("b", "a", "c")]
    shuffled = list(tools)
    order.shuffle(shuffled)
    assert canonical_tools(shuffled) == canonical_tools(tools)
    assert orjson.dumps(canonical_tools(shuffled)) == orjson.dumps(canonical_tools(tools))
    assert meaning_of(shuffled) == meaning_of(canonical_tools(tools))


# -- properties -----------------------------------------------------------------------------------------------------

_LINE = st.one_of(
    st.sampled_from([line for line, _ in VOLATILE] + STEADY + ["<env>", "</env>", "gitStatus: x", "", "  "]),
    st.text(max_size=60),
)
_PROMPT = st.lists(_LINE, max_size=14).map("\n".join)


@given(texts=st.lists(_PROMPT, min_size=1, max_size=3), parts=st.booleans())
def test_the_original_can_be_put_together_again(texts, parts):
    messages = [system([{"type": "text", "text": t} for t in texts])] if parts else [system(t) for t in texts]
    tools = [tool("f", texts[0])]
    cleaned = clean(messages, tools, ON)
    assert restored(cleaned.messages, cleaned.tools, cleaned.moved) == (tuple(messages), tools)


@given(text=_PROMPT)
def test_spans_are_in_order_and_within_the_text(text):
    place = 0
    for start, end, rule in volatile(text):
        assert place <= start < end <= len(text)
        assert rule in RULES
        place = end


_CLOCK = st.tuples(
    st.integers(0, 23), st.integers(0, 59), st.integers(1, 28), st.text("0123456789abcdef", min_size=5, max_size=5)
)


@given(turns=st.lists(_CLOCK, min_size=2, max_size=12), budget=st.sampled_from([1024, 16_384]))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_view_only_grows_although_the_clock_runs(session, turns, budget):
    chat = session(budget)
    before: list[Any] = []
    for number, (hour, minute, day, cch) in enumerate(turns):
        prompt = system(
            f"x-anthropic-billing-header: cch={cch};\n{AGENT}Current time: 2026-11-{day:02} {hour:02}:{minute:02}\nBe brief."
        )
        cleaned = clean([prompt], None, ON)
        new = [*(cleaned.messages if number == 0 else ()), {"role": "user", "content": f"Question {number}. " * 12}]
        prepared = chat.say(*new, moved=cleaned.moved)
        view = chat.view.render()
        assert view[0]["content"] == f"{AGENT}Be brief."
        if prepared.epoch is None:
            assert view[: len(before)] == before
        shown = "\n".join(str(m["content"]) for m in view)
        assert f"2026-11-{day:02} {hour:02}:{minute:02}" in shown, (
            "the newest time is in view, before and after a compaction"
        )
        assert "cch=" not in shown
        before = view
        chat.answer({"role": "assistant", "content": "It is so. " * 6})


def test_a_note_stays_when_the_message_that_had_it_is_condensed(session):
    chat = session(1024)
    cleaned = clean([system(f"{AGENT}Today's date: 2026-11-29\n")], None, ON)
    chat.say(*cleaned.messages, {"role": "user", "content": "Hello"}, moved=cleaned.moved)
    epochs = 0
    for turn in range(40):
        chat.answer({"role": "assistant", "content": "It is so. " * 6})
        prepared = chat.say({"role": "user", "content": f"Question {turn}. " * 10}, moved=cleaned.moved)
        epochs += prepared.epoch is not None
        holders = [m for m in chat.view.render() if "2026-11-29" in str(m["content"])]
        assert holders
        assert all(m["role"] in {"user", "tool"} for m in holders)
    assert epochs >= 2
