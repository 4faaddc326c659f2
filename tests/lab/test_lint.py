"""What breaks the prefix: found at the right place, priced, and told with what mends it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from kvsteward.cli import app
from kvsteward.context.hygiene import Hygiene, Rule, clean
from kvsteward.context.tokens import Estimator
from kvsteward.errors import ConfigError
from kvsteward.lab.lint.read import Logged, Recorded, read_requests, requests_of_logs
from kvsteward.lab.lint.report import FIELD, OPTION, Report, lint
from kvsteward.lab.lint.turns import ANEW, REWRITTEN, is_trace, lint_trace

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "agent"
RULES = "You are a coding agent. Follow the rules of the house. " * 12
TOOLS = [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in ("read", "write")]
PNG = "data:image/png;base64,iVBORw0KGgo"
Body = dict[str, Any]


def call(number: int, arguments: str) -> dict[str, Any]:
    function = {"name": "read", "arguments": arguments}
    made = [{"id": f"c{number}", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": made}


def bodies(turns: int, system: Any = lambda _: RULES) -> list[Body]:
    """A session of an agent: question, call, result, answer; one request for each call and each answer."""
    history: list[Any] = []
    made = []
    for turn in range(turns):
        history = [*history, {"role": "user", "content": f"Step {turn}: look at module {turn * 31}. " * 4}]
        made.append({"model": "m", "tools": TOOLS, "messages": [{"role": "system", "content": system(turn)}, *history]})
        history = [*history, call(turn, f'{{"path": "m{turn}.py", "line": {turn}}}')]
        history.append({"role": "tool", "tool_call_id": f"c{turn}", "content": f"Module {turn} holds the parser. " * 9})
        made.append({**made[-1], "messages": [{"role": "system", "content": system(turn)}, *history]})
        history = [*history, {"role": "assistant", "content": f"It is module {turn * 31}. " * 4}]
    return made


def report(*made: Body, session: str = "s") -> Report:
    return lint([Recorded(body, session, line) for line, body in enumerate(made, 1)])


def test_a_session_that_only_grows_has_no_finding():
    found = report(*bodies(5))
    assert (found.findings, found.lost_tokens, found.followed, found.requests) == ((), 0, 9, 10)


def test_a_clock_in_the_system_prompt():
    made = bodies(3, lambda turn: f"You are an agent.\nCurrent time: 2026-11-29 18:0{turn}\n{RULES}")
    (found,) = report(*made).findings
    assert (found.kind, found.part, found.request, found.times) == ("a date or time", "message 1 (system)", 3, 2)
    system = made[0]["messages"][0]["content"]
    assert found.character == system.index("18:00") + 4
    tools = sum(5 + Estimator().text(json.dumps(t, separators=(",", ":"))) for t in TOOLS)
    assert found.token == tools + Estimator().text(system[: found.character])
    assert found.mended_by == "hygiene rule 'date or time'"
    assert 0.2 < found.lost_ratio < 0.8


def test_what_it_costs_is_what_the_earlier_prompt_had():
    made = bodies(2, lambda turn: f"t{turn} {RULES}")
    found = report(made[1], made[2])
    whole = report(made[1]).prompt_tokens
    assert found.findings[0].token + found.lost_tokens == whole


def test_what_changes_behind_it_is_said_too():
    made = bodies(
        3, lambda turn: f"x-anthropic-billing-header: cch=a{turn}f31;\nToday is 2026-11-1{turn}.\ncwd: /a\n{RULES}"
    )
    made[4]["tools"] = TOOLS[::-1]
    order, line = report(*made).findings
    assert (line.kind, line.behind, line.times) == ("a billing line", ("date or time",), 1)
    assert (order.kind, order.request, order.times) == ("the order of the tools", 5, 2)
    assert order.lost_tokens > line.lost_tokens


def test_a_rule_is_proposed_where_none_finds_the_line():
    made = bodies(2, lambda turn: f"{RULES}\nBuild of the day {turn}71\nBe brief.")
    (found,) = report(*made).findings
    assert found.mended_by == ""
    rule = Rule(**json.loads(found.rule))
    cleaned = [clean(b["messages"], b["tools"], Hygiene(rules=(rule,))) for b in made]
    assert len({str(c.messages[0]) for c in cleaned}) == 1


def changed(change: Any) -> list[Body]:
    """Two consecutive requests, the second with a change to what the first had."""
    made = [copy.deepcopy(body) for body in bodies(3)[3:5]]
    change(made[1])
    return made


def set_(index: int, key: str, value: Any) -> Any:
    def change(body: Body) -> None:
        body["messages"][index][key] = value

    return change


def arguments_anew(body: Body) -> None:
    body["messages"][2]["tool_calls"][0]["function"]["arguments"] = '{"line":0,"path":"m0.py"}'


@pytest.mark.parametrize(
    ("change", "kind", "part"),
    [
        (lambda body: body.update(tools=TOOLS[::-1]), "the order of the tools", "tool 1"),
        (lambda body: body.update(tools=TOOLS[:1]), "the tools themselves", "tool 2"),
        (
            lambda body: body.update(tools=[{"function": TOOLS[0]["function"], "type": "function"}, TOOLS[1]]),
            "the order of keys in the tools",
            "tool 1",
        ),
        (set_(3, "content", "[old result cleared]"), "a tool result that was changed", "message 4 (tool)"),
        (set_(4, "content", "It is module 0."), "an answer that came back changed", "message 5 (assistant)"),
        (arguments_anew, "call arguments written anew", "message 3 (assistant)"),
        (lambda body: body.update(model="other"), OPTION, "model"),
        (lambda body: body.update(chat_template_kwargs={"enable_thinking": False}), OPTION, "chat_template_kwargs"),
        (set_(4, "reasoning_content", "hm"), FIELD, "message 5: reasoning_content"),
    ],
)
def test_what_changed_is_named(change, kind, part):
    (found,) = report(*changed(change)).findings
    assert (found.kind, found.part, found.request) == (kind, part, 2)
    assert found.advice
    assert (found.lost_tokens == 0) == (kind == FIELD)


def test_a_rewritten_history():
    made = bodies(6)
    messages = made[10]["messages"]
    made[10]["messages"] = [messages[0], {"role": "user", "content": "Summary: parser found."}, *messages[-5:]]
    (found,) = report(*made[8:11]).findings
    assert found.kind == "a history that is rewritten (compaction)"


def test_an_image_that_was_encoded_anew():
    def with_image(url: str) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": url}}
        return {"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}

    first = {"messages": [{"role": "system", "content": RULES}, with_image(PNG)]}
    answer = [{"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Sure?"}]
    second = {"messages": [first["messages"][0], with_image(PNG + "AAAA"), *answer]}
    assert [f.kind for f in report(first, second).findings] == ["an image that was encoded anew"]
    assert report(first, {"messages": [*first["messages"], *answer]}).findings == ()


def test_findings_of_one_kind_are_one_dearest_first():
    made = bodies(6, lambda turn: f"Today's date: 2026-11-{turn + 1:02}\n{RULES}")
    made[5]["messages"] = copy.deepcopy(made[5]["messages"])
    made[5]["messages"][3]["content"] = "[cleared]"
    found = report(*made).findings
    assert [f.kind for f in found] == ["a date or time", "a tool result that was changed"]
    assert found[0].times == 5
    assert found[0].lost_tokens > found[1].lost_tokens > 0


def test_sessions_without_a_name_are_told_apart_by_what_they_share():
    one = bodies(3)
    other = [json.loads(json.dumps(b).replace("odule", "lant").replace("coding agent", "gardener")) for b in bodies(3)]
    mixed = [body for pair in zip(one, other, strict=True) for body in pair]
    assert report(*mixed, session="").findings == ()


@given(st.lists(st.text(max_size=40), min_size=1, max_size=8))
def test_whatever_grows_at_its_end_has_no_finding(texts):
    history: list[dict[str, str]] = [{"role": "system", "content": RULES}]
    made = []
    for text in texts:
        history = [*history, {"role": "user", "content": text}]
        made.append({"messages": history})
    assert report(*made).findings == ()


# -- formats --------------------------------------------------------------------------------------------------------


def lines(*values: Any) -> bytes:
    return b"\n".join(json.dumps(value).encode() for value in values)


def test_wrapped_bodies_and_their_sessions():
    body = bodies(1)[0]
    found = read_requests(
        lines(
            body,
            {**body, "session_id": "a"},
            {"headers": {"X-Session-ID": "b"}, "body": body},
            {"request": {"headers": {"session-id": "c"}, "body": json.dumps(body)}, "response": {}},
            {"session": "d", "payload": {"json": body}},
        )
    )
    assert [one.session for one in found] == ["", "a", "b", "c", "d"]
    assert all(one.body["messages"] == body["messages"] for one in found)


def test_a_list_and_a_single_value():
    body = bodies(1)[0]
    assert len(read_requests(json.dumps([body, body]).encode())) == 2
    assert len(read_requests(json.dumps(body, indent=2).encode())) == 1


def test_a_conversation_becomes_one_request_for_each_answer():
    messages = [*bodies(2)[3]["messages"], {"role": "assistant", "content": "Done."}]
    found = read_requests(lines({"id": "x1", "messages": messages}))
    assert [len(one.body["messages"]) for one in found] == [2, 4, 6, 8]
    assert {one.session for one in found} == {"x1"}
    assert lint(found).findings == ()


def test_anthropic_bodies_are_the_same_prompt():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo"}}
    body = {
        "model": "c",
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=00a1b;"}, {"type": "text", "text": RULES}],
        "tools": [{"name": "read", "description": "d", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Go"}, image]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "tool_use", "id": "t1", "name": "read", "input": {"p": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "x"}]}]},
        ],
    }  # fmt: skip
    (one,) = read_requests(lines(body))
    roles = [m["role"] for m in one.body["messages"]]
    assert roles == ["system", "user", "assistant", "tool"]
    assert one.body["tools"] == [
        {"type": "function", "function": {"name": "read", "description": "d", "parameters": {"type": "object"}}}
    ]
    assert one.body["messages"][1]["content"][1] == {"type": "image_url", "image_url": {"url": PNG}}
    assert one.body["messages"][2]["tool_calls"][0]["function"] == {"name": "read", "arguments": '{"p":1}'}
    later = json.loads(json.dumps(body).replace("00a1b", "77fff"))
    later["messages"].append({"role": "assistant", "content": "Done."})
    later["messages"].append({"role": "user", "content": "More"})
    (found,) = lint(read_requests(lines(body, later))).findings
    assert (found.kind, found.mended_by) == ("a billing line", "hygiene rule 'billing'")


@pytest.mark.parametrize("line", ["{", "3", "{}", '{"messages": []}', '{"body": {"prompt": "x"}}', '{"messages": [1]}'])
def test_a_line_that_is_no_request_is_named(line):
    with pytest.raises(ConfigError, match="line 2"):
        read_requests(lines(bodies(1)[0]) + b"\n" + line.encode())


@pytest.mark.shared_data
@pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data beside the checkout: recorded data stays outside")
def test_recorded_conversations_only_grow():
    for path in (DATA / "sweagent.jsonl", DATA / "toolbench.jsonl"):
        found = lint(read_requests(path.read_bytes(), path.name))
        assert found.requests > 20
        assert found.findings == ()


def weka(*prompts: tuple[int, list[int]]) -> dict[str, Any]:
    requests = [{"t": 0.0, "in": tokens, "out": 9, "hash_ids": ids, "think_time": 1.0} for tokens, ids in prompts]
    return {"id": "w1", "block_size": 64, "requests": requests}


def test_a_trace_without_text(tmp_path):
    grown = [(640, list(range(10))), (1280, list(range(20))), (1900, list(range(29)))]
    shrunk = (960, [*range(5), *range(100, 110)])
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(weka(*grown)))
    assert lint_trace(path).findings == ()
    path.write_text(json.dumps(weka(*grown, shrunk, (640, list(range(200, 210))))))
    assert is_trace(path)
    found = {f.kind: f for f in lint_trace(path).findings}
    assert set(found) == {REWRITTEN, ANEW}
    assert (found[REWRITTEN].request, found[REWRITTEN].token, found[REWRITTEN].lost_tokens) == (4, 5 * 64, 640)
    assert (found[ANEW].request, found[ANEW].token, found[ANEW].lost_tokens) == (5, 0, 640)


def test_a_trace_without_sessions_is_refused(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}))
    with pytest.raises(ConfigError, match="does not tell sessions apart"):
        lint_trace(path)


@pytest.mark.shared_data
@pytest.mark.skipif(not DATA.is_dir(), reason="the recorded traces are not there")
def test_recorded_coding_agents_mostly_grow():
    found = lint_trace(DATA.parent / "traces" / "weka" / "raw")
    assert found.requests > 200
    assert found.lost_ratio < 0.2


# -- the command ----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["lint", *arguments], env={"COLUMNS": "100"})


def test_the_command_says_where_and_exits_with_one(tmp_path):
    clean_file, broken_file = tmp_path / "clean.jsonl", tmp_path / "broken.jsonl"
    clean_file.write_bytes(lines(*bodies(2)))
    broken_file.write_bytes(lines(*bodies(3, lambda turn: f"Today's date: 2026-11-{turn + 10}\n{RULES}")))
    done = run(str(clean_file))
    assert (done.exit_code, "Nothing breaks the prefix" in done.stdout) == (0, True)
    done = run(str(broken_file))
    assert done.exit_code == 1
    assert "a date or time" in done.stdout
    assert "message 1 (system), character" in done.stdout
    assert "hygiene rule 'date or time'" in done.stdout
    assert all(len(line) <= 100 for line in done.stdout.splitlines())
    done = run(str(broken_file), "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["findings"][0]["kind"]) == (1, "a date or time")
    assert found["lost_tokens"] == found["findings"][0]["lost_tokens"]
    done = run(str(tmp_path / "none.jsonl"))
    assert isinstance(done.exception, ConfigError)
    assert "none.jsonl" in done.exception.message


def test_a_running_gateway(serve):
    gateway = serve("--engine", "scripted")
    history: list[Any] = []
    for turn in range(4):
        history.append({"role": "user", "content": f"Question {turn}?"})
        system = {"role": "system", "content": f"Current time: 2026-11-29 18:0{turn}\n{RULES}"}
        answer = gateway.chat([system, *history], "s1", tools=TOOLS)
        history.append(answer["choices"][0]["message"])
    done = run(gateway.url, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 1, done.output
    assert (found["requests"], found["sessions"]) == (4, 1)
    assert [(f["kind"], f["times"], f["session"]) for f in found["findings"]] == [("a date or time", 3, "s1")]


def talk(gateway: Any, about: str, system: Any, session: str | None = None, turns: int = 4) -> list[Any]:
    """A client that sends its whole history with each turn; what it sent."""
    history: list[Any] = []
    sent = []
    for turn in range(turns):
        history.append({"role": "user", "content": f"{about}, question {turn}?"})
        sent.append([{"role": "system", "content": system(turn)}, *history])
        history.append(gateway.chat(sent[-1], session, max_tokens=16)["choices"][0]["message"])
    return sent


def dated(turn: int) -> str:
    return f"You are an agent.\nToday's date: 2026-11-1{turn}\n{RULES}"


@pytest.mark.parametrize("session", ["s1", None], ids=["one session with many branches", "a session with each turn"])
def test_a_client_that_rewrites_its_prompt_is_found_at_a_gateway(serve, tmp_path, session):
    policy = tmp_path / "policy.yaml"
    policy.write_text("hygiene: {enabled: false}\n")
    gateway = serve("--engine", "scripted", "--policy", str(policy))
    for about in ("Apples", "Pears"):
        talk(gateway, about, lambda _: RULES, about if session else None)
    done = run(gateway.url, "--json")
    assert (done.exit_code, json.loads(done.stdout)["findings"]) == (0, []), "who only appends is clean"
    sent = talk(gateway, "Plums", dated, session)
    rows = gateway.get("/v1/sessions")["data"]
    assert len(rows) == 3 if session else len(rows) == 6
    found = json.loads(run(gateway.url, "--json").stdout)
    assert (found["requests"], found["sessions"], found["followed"], found["left_out"]) == (12, 3, 9, "")
    (one,) = found["findings"]
    told = report(*({"messages": messages} for messages in sent)).findings[0]
    at = ("kind", "part", "character", "token", "before", "after", "times", "lost_tokens", "mended_by")
    assert [one[name] for name in at] == [getattr(told, name) for name in at], "as in a file of the same requests"
    assert (one["kind"], one["times"], one["request"]) == ("a date or time", 3, 2)
    assert dated(0)[: one["character"]] == "You are an agent.\nToday's date: 2026-11-1"
    assert one["session"] == (session or min(rows[:4], key=lambda row: row["created_s"])["id"])


def logged(id_: str, at_s: float, *branches: list[tuple[str, str, str]], **row: Any) -> Logged:
    """A session whose branches are messages: source, role and text. They share what they begin with."""
    entries: dict[str, Any] = {}
    for branch in branches:
        parent = ""
        for source, role, text in branch:
            hash_ = f"{parent}/{role}:{text}"
            entry = {"hash": hash_, "parent": parent, "source": source, "created_s": float(len(entries))}
            entries.setdefault(hash_, {**entry, "message": {"role": role, "content": text}})
            parent = hash_
    return Logged({"id": id_, "created_s": at_s, **row}, list(entries.values()), [])


U, A = ("client", "user"), ("engine", "assistant")


def test_each_answer_of_a_log_is_one_request_on_its_own_branch():
    asked = [(*U, "a"), (*A, "1"), (*U, "b"), (*A, "2")]
    edited = [*asked[:2], (*U, "c"), (*A, "3")]
    made = requests_of_logs([logged("s", 5.0, asked, edited)])
    texts = [[m["content"] for m in one.body["messages"]] for one in made]
    assert texts == [["a"], ["a", "1", "b"], ["a", "1", "c"]]
    assert [(one.session, one.line) for one in made] == [("s", 1), ("s", 2), ("s", 3)]


def test_a_branch_that_became_a_session_counts_its_past_once():
    asked = [(*U, "a"), (*A, "1"), (*U, "b"), (*A, "2")]
    edited = [*asked[:2], (*U, "c"), (*A, "3")]
    first, second = logged("s", 0.0, asked), logged("t", 9.0, edited, branched_from="s")
    made = requests_of_logs([second, first])
    assert [one.body["messages"][-1]["content"] for one in made] == ["a", "b", "c"]
    assert {one.session for one in made} == {"s"}


def test_a_session_is_another_one_where_only_an_answer_or_only_a_question_is_the_same():
    first = logged("s", 0.0, [(*U, "a"), (*A, "Done.")])
    for question, answer, name in (("a", "Done.", "s"), ("b", "Done.", "t"), ("a", "done", "t")):
        begun = [(*U, question), ("client", "assistant", answer), (*U, "more"), (*A, "2")]
        made = requests_of_logs([first, logged("t", 9.0, begun)])
        assert [one.session for one in made] == ["s", name], (question, answer)
