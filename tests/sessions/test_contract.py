"""What every session store does: one matrix, run on each."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from kvsteward.errors import InvariantError, NotFoundError, StateError
from kvsteward.sessions import Decision, SessionStore
from kvsteward.sessions.base import PAGE_BYTES
from kvsteward.wire import fingerprint


def fill(store, make, *texts, id_="s1", **fields):
    """A session with a chain of messages, its head at the last."""
    session = make.session(id_, **fields)
    store.create(session)
    entries = make.chain(*texts, tenant=session.tenant)
    session = replace(session, head=entries[-1].hash)
    store.append(session, entries)
    return session, entries


def test_a_session_comes_back_as_it_was(store: SessionStore, make) -> None:
    session = make.session(
        tenant="t",
        model="m",
        title="é",
        turns=3,
        branched_from="x",
        view_tokens=1,
        log_tokens=2,
        saved_tokens=3,
        compactions=4,
        again_tokens=5,
    )
    store.create(session)
    assert store.get("s1") == session
    assert store.get("other") is None
    with pytest.raises(StateError):
        store.create(session)


def test_put_replaces_the_row_and_not_the_log(store: SessionStore, make) -> None:
    session, entries = fill(store, make, "a", "b")
    changed = replace(session, state="idle", head=entries[0].hash, last_used_s=200.0, turns=7)
    store.put(changed)
    assert store.get("s1") == changed
    assert store.path("s1", entries[1].hash) == entries
    assert store.path("s1") == entries[:1]


def test_a_head_that_is_not_in_the_log_is_refused(store: SessionStore, make) -> None:
    session, _ = fill(store, make, "a")
    for write in (store.put, lambda s: store.append(s, [])):
        with pytest.raises(InvariantError):
            write(replace(session, head="f" * 32))
    with pytest.raises(InvariantError):
        store.create(make.session("s2", head="f" * 32))
    assert store.get("s1") == session
    assert store.get("s2") is None


def test_list_is_newest_use_first(store: SessionStore, make) -> None:
    for id_, used_s, tenant in (("a", 1.0, "t"), ("b", 3.0, "u"), ("c", 2.0, "t"), ("d", 2.0, "t")):
        store.create(make.session(id_, used_s=used_s, tenant=tenant))
    assert [s.id for s in store.list()] == ["b", "c", "d", "a"]
    assert [s.id for s in store.list(tenant="t")] == ["c", "d", "a"]
    assert [s.id for s in store.list(limit=2, offset=1)] == ["c", "d"]
    assert store.list(limit=0) == []
    assert store.list(limit=-1, offset=-5) == []


def test_entries_come_back_byte_for_byte(store: SessionStore, make) -> None:
    session = make.session()
    store.create(session)
    raw = b' {"role" : "user", "content": "\\u00e9 \xc3\xa9", "x": 1.50}\n'
    [entry] = make.chain("é é")
    entry = replace(entry, raw=raw, tokens=4, finish="stop", response_id="r1", source="engine")
    store.append(replace(session, head=entry.hash), [entry])
    assert store.path("s1") == [entry]
    assert store.verify() == []


def test_an_entry_that_is_there_stays_as_it_is(store: SessionStore, make) -> None:
    session, entries = fill(store, make, "a", "b")
    later = [replace(entry, created_s=999.0, tokens=9) for entry in entries]
    store.append(session, [*later, *later])
    assert store.path("s1") == entries
    assert store.verify() == []


def test_an_edited_history_is_a_second_branch(store: SessionStore, make) -> None:
    session, entries = fill(store, make, "a", "b", "c")
    other = make.chain("B", "C", after=entries[0])
    store.append(replace(session, head=other[-1].hash), other)
    assert store.path("s1") == [entries[0], *other]
    assert store.path("s1", entries[-1].hash) == entries
    assert store.verify() == []


def test_entries_of_all_branches_come_in_pages_as_they_came(store: SessionStore, make) -> None:
    session, entries = fill(store, make, "a", "b", "c")
    fill(store, make, "a", "other", id_="s2")
    other = [replace(entry, created_s=1.0) for entry in make.chain("B", "C", after=entries[0])]
    store.append(replace(session, head=other[-1].hash), other)
    store.append(replace(session, head=entries[-1].hash), [entries[1]])
    whole = [*entries, *other]
    assert store.entries("s1") == whole
    assert [store.entries("s1", offset=at, limit=2) for at in (0, 2, 4, 5, 99)] == [
        whole[:2],
        whole[2:4],
        whole[4:],
        [],
        [],
    ]
    assert store.entries("s1", offset=-3, limit=1) == whole[:1]
    assert store.entries("s1", limit=0) == store.entries("s1", limit=-1) == []
    store.branch(make.session("s3"), "s1", other[-1].hash)
    assert store.entries("s3") == [entries[0], *other]
    with pytest.raises(NotFoundError):
        store.entries("none")


def test_a_page_of_entries_is_bounded_in_bytes(store: SessionStore, make) -> None:
    texts = ["x" * (PAGE_BYTES + 1), "a" * (PAGE_BYTES // 2), "b" * (PAGE_BYTES // 4), "c" * (PAGE_BYTES // 2)]
    _, entries = fill(store, make, *texts)
    assert [len(store.entries("s1", offset=at)) for at in range(5)] == [1, 2, 2, 1, 0]
    assert store.entries("s1", offset=1) == entries[1:3]


def test_a_row_is_changed_as_it_stands(store: SessionStore, make) -> None:
    session, entries = fill(store, make, "a")
    stored = replace(session, turns=3)
    store.put(stored)
    more = make.chain("b", after=entries[0])
    decision = Decision(more[0].hash, "distil", b"{}", 1.0)
    store.draft("s1", "t1", entries[0].hash, b"{}", now=1.0)
    changed = store.amend(
        "s1", lambda seen: replace(seen, head=more[0].hash, turns=seen.turns + 1), more, [decision], end_draft="t1"
    )
    assert changed == store.get("s1") == replace(stored, head=more[0].hash, turns=4)
    assert store.path("s1") == [*entries, *more]
    assert store.decisions("s1") == [decision]
    assert store.recover(now=2.0) == 0
    with pytest.raises(InvariantError):
        store.amend("s1", lambda seen: replace(seen, turns=9, head="f" * 32))
    with pytest.raises(ZeroDivisionError):
        store.amend("s1", lambda seen: replace(seen, turns=1 // 0), make.chain("c"))
    assert store.get("s1") == changed
    assert store.amend("none", lambda seen: seen, more) is None
    assert store.verify() == []


def test_path_of_nothing_and_of_the_unknown(store: SessionStore, make) -> None:
    store.create(make.session())
    store.create(make.session("s2", head=""))
    assert store.path("s1") == []
    assert store.path("s2") == []
    assert store.path("s1", fingerprint.root()) == []
    with pytest.raises(NotFoundError):
        store.path("s1", "f" * 32)


@pytest.mark.parametrize("fault", ["parent", "depth", "decision", "root of another tenant"])
def test_a_write_that_breaks_the_chain_changes_nothing(store: SessionStore, make, fault: str) -> None:
    session, entries = fill(store, make, "a")
    good, bad = make.chain("b", "c", after=entries[-1])
    decisions = [Decision("e" * 32, "distil", b"{}", 1.0)] if fault == "decision" else []
    if fault == "parent":
        bad = replace(bad, parent="e" * 32)
    elif fault == "depth":
        bad = replace(bad, depth=9)
    elif fault == "root of another tenant":
        bad = make.chain("c", tenant="other")[0]
    with pytest.raises(InvariantError):
        store.append(replace(session, turns=5), [good, bad], decisions)
    assert store.get("s1") == session
    assert store.find([good.hash]) == []
    assert store.decisions("s1") == []
    assert store.verify() == []


def test_what_needs_a_session_says_that_there_is_none(store: SessionStore, make) -> None:
    session = make.session("none")
    for call in (
        lambda: store.put(session),
        lambda: store.append(session, []),
        lambda: store.path("none"),
        lambda: store.decisions("none"),
        lambda: store.item("none", "0" * 8),
        lambda: store.search("none", "x"),
        lambda: store.branch(make.session("new"), "none", ""),
        lambda: store.draft("none", "t", "", b"{}", now=1.0),
        lambda: store.verify("none"),
    ):
        with pytest.raises(NotFoundError):
            call()
    assert store.delete("none") is False
    assert store.list() == []


def test_find_keeps_the_order_of_hashes_and_the_newest_use_first(store: SessionStore, make) -> None:
    _, entries = fill(store, make, "a", "b", id_="old", used_s=1.0)
    fill(store, make, "a", id_="new", used_s=2.0)
    fill(store, make, "a", id_="tenant", used_s=3.0, tenant="t")
    found = store.find([entries[1].hash, "f" * 32, entries[0].hash, entries[1].hash])
    assert [(f.session_id, f.hash, f.is_head) for f in found] == [
        ("old", entries[1].hash, True),
        ("new", entries[0].hash, True),
        ("old", entries[0].hash, False),
    ]
    assert [f.last_used_s for f in found] == [1.0, 2.0, 1.0]
    assert store.find([]) == []
    only = store.find([entries[1].hash, entries[0].hash], session_id="new")
    assert [(f.session_id, f.hash) for f in only] == [("new", entries[0].hash)]


def test_find_takes_more_hashes_than_one_statement_could(store: SessionStore, make) -> None:
    _, entries = fill(store, make, *(str(n) for n in range(2500)))
    hashes = [entry.hash for entry in reversed(entries)]
    assert [found.hash for found in store.find([f"{n:032x}" for n in range(40_000)] + hashes)] == hashes


def test_find_response_is_by_tenant(store: SessionStore, make) -> None:
    session = make.session(tenant="t")
    store.create(session)
    entries = make.chain("q", tenant="t") + make.chain("a", after=make.chain("q", tenant="t")[0], response_id="resp_1")
    store.append(replace(session, head=entries[1].hash), entries)
    found = store.find_response("t", "resp_1")
    assert found is not None
    assert (found.session_id, found.hash, found.is_head) == ("s1", entries[1].hash, True)
    assert store.find_response("other", "resp_1") is None
    assert store.find_response("t", "resp_2") is None
    store.delete("s1")
    assert store.find_response("t", "resp_1") is None


def test_decisions_are_kept_oldest_first(store: SessionStore, make) -> None:
    session, entries = fill(store, make, "a", "b")
    first = Decision(entries[1].hash, "distil", b'{"n":1}', 5.0)
    second = Decision(entries[0].hash, "compact", b'{"n":2}', 5.0)
    store.append(session, [], [first])
    store.append(session, [], [second])
    assert store.decisions("s1") == [first, second]
    assert store.verify() == []


def test_item_is_found_by_prefix(store: SessionStore, make) -> None:
    session, entries = fill(store, make, "a", "b")
    assert store.item("s1", entries[1].hash[:8]) == entries[1]
    assert store.item("s1", entries[1].hash.upper()) == entries[1]
    assert store.item("s1", "0" * 32) is None
    for bad in (entries[1].hash[:7], "", "%%%%%%%%", "________"):
        with pytest.raises(NotFoundError):
            store.item("s1", bad)
    # The store takes the caller's word for a hash, so two that begin alike can be made.
    twin = replace(make.chain("c")[0], hash=entries[0].hash[:10] + "0" * 22)
    store.append(session, [twin])
    with pytest.raises(NotFoundError, match="two"):
        store.item("s1", entries[0].hash[:8])
    assert store.item("s1", entries[0].hash) == entries[0]


@pytest.mark.parametrize(
    "needle", ['say "hi"', "line\nbreak", "naïve 漢字", "100%_", "C:\\dir", "a\tb", "😀", "/path", "'; DROP"]
)
@pytest.mark.parametrize("ascii_", [True, False])
def test_search_finds_text_however_it_was_escaped(store: SessionStore, make, needle: str, ascii_: bool) -> None:
    import json

    session = make.session()
    store.create(session)
    arguments = json.dumps({"text": f"<{needle}>"}, ensure_ascii=ascii_)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    root = fingerprint.root()
    messages = [
        {"role": "user", "content": f"({needle})"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "user", "content": "other 100x_ 1005"},
    ]
    entries = []
    for depth, message in enumerate(messages, 1):
        entry = make.entry(message, root, depth)
        root = entry.hash
        entries.append(replace(entry, raw=json.dumps(message, ensure_ascii=ascii_).encode()))
    store.append(replace(session, head=root), entries)
    assert store.search("s1", needle) == [entries[1], entries[0]]
    assert store.search("s1", needle, limit=1) == [entries[1]]
    assert store.search("s1", needle, limit=0) == []
    assert store.search("s1", needle + "no") == []


def test_a_branch_has_its_own_copy_of_the_path(store: SessionStore, make) -> None:
    session, entries = fill(store, make, "a", "b", "c")
    on, off = Decision(entries[0].hash, "distil", b"1", 1.0), Decision(entries[2].hash, "distil", b"2", 2.0)
    store.append(session, [], [on, off])
    store.branch(make.session("s2", branched_from="s1"), "s1", entries[1].hash)
    branch = store.get("s2")
    assert branch is not None
    assert branch.head == entries[1].hash
    assert branch.branched_from == "s1"
    assert store.path("s2") == entries[:2]
    assert store.decisions("s2") == [on]
    assert store.verify() == []
    store.delete("s1")
    assert store.path("s2") == entries[:2]
    assert store.verify() == []


def test_a_branch_that_cannot_be_made_leaves_nothing(store: SessionStore, make) -> None:
    _, entries = fill(store, make, "a")
    with pytest.raises(StateError):
        store.branch(make.session("s1"), "s1", entries[0].hash)
    with pytest.raises(NotFoundError):
        store.branch(make.session("s2"), "s1", "f" * 32)
    with pytest.raises(InvariantError):
        store.branch(make.session("s2", tenant="t"), "s1", entries[0].hash)
    assert store.get("s2") is None
    store.branch(make.session("s2"), "s1", fingerprint.root())
    assert store.path("s2") == []


def test_recover_turns_drafts_into_interrupted_entries(store: SessionStore, make) -> None:
    session, entries = fill(store, make, "q", state="active")
    parent = entries[0].hash
    store.draft("s1", "t1", parent, b'{"role":"assistant","content":"ha"}', now=1.0)
    store.draft("s1", "t1", parent, b'{"role":"assistant","content":"half"}', now=2.0)
    assert store.path("s1") == entries
    assert store.recover(now=300.0) == 1
    _, answer = store.path("s1")
    assert (answer.raw, answer.source, answer.finish) == (
        b'{"role":"assistant","content":"half"}',
        "engine",
        "interrupted",
    )
    assert (answer.depth, answer.created_s, answer.parent) == (2, 300.0, parent)
    assert store.get("s1") == replace(session, state="idle", head=answer.hash)
    assert store.recover(now=301.0) == 0
    assert store.verify() == []


def test_recover_leaves_a_head_that_has_moved_on(store: SessionStore, make) -> None:
    _, entries = fill(store, make, "q", "a")
    store.draft("s1", "t1", entries[0].hash, b'{"role":"assistant","content":"x"}', now=1.0)
    store.draft("s1", "t2", entries[1].hash, b'{"role":"assistant","content":"older"}', now=1.0)
    store.draft("s1", "t3", entries[1].hash, b'{"role":"assistant","content":"newer"}', now=2.0)
    store.draft("s1", "t2", entries[1].hash, b'{"role":"assistant","content":"older!"}', now=3.0)
    assert store.recover(now=4.0) == 3
    assert b"newer" in store.path("s1")[-1].raw
    assert len(store.path("s1")) == 3
    assert len(store.search("s1", "older!")) == 1
    assert store.verify() == []


@pytest.mark.parametrize("text", [b"", b"half a w", b"[1]", b'{"role":', b"\xff\xfe", b'{"a":NaN}'])
def test_a_draft_that_is_no_message_is_not_lost(store: SessionStore, make, text: bytes) -> None:
    fill(store, make, "q")
    store.draft("s1", "t1", store.get("s1").head, text, now=1.0)
    assert store.recover(now=2.0) == 1
    assert store.path("s1")[-1].finish == "interrupted"
    assert store.verify() == []


def test_append_ends_the_draft_of_its_turn_alone(store: SessionStore, make) -> None:
    session, entries = fill(store, make, "q")
    for turn in ("t1", "t2"):
        store.draft("s1", turn, entries[0].hash, b'{"role":"assistant","content":"x"}', now=1.0)
    answer = make.chain("answer", after=entries[0])
    store.append(replace(session, head=answer[0].hash), answer, end_draft="t1")
    assert store.recover(now=2.0) == 1
    assert store.path("s1") == [*entries, *answer]


def test_a_draft_needs_a_parent(store: SessionStore, make) -> None:
    fill(store, make, "q")
    with pytest.raises(InvariantError):
        store.draft("s1", "t1", "f" * 32, b"{}", now=1.0)
    store.draft("s1", "t1", fingerprint.root(), b'{"role":"assistant"}', now=1.0)
    assert store.recover(now=2.0) == 1


def test_delete_leaves_nothing(store: SessionStore, make) -> None:
    session, entries = fill(store, make, "a", "b")
    store.append(session, [], [Decision(entries[0].hash, "distil", b"1", 1.0)])
    store.draft("s1", "t1", entries[0].hash, b'{"role":"assistant"}', now=1.0)
    assert store.delete("s1") is True
    assert store.delete("s1") is False
    assert store.get("s1") is None
    assert store.find([entry.hash for entry in entries]) == []
    assert store.recover(now=2.0) == 0
    store.create(make.session())
    assert store.path("s1") == []
    assert store.decisions("s1") == []
    assert store.verify() == []


def test_sweep_expires_by_ttl_and_keeps_the_log(store: SessionStore, make) -> None:
    for state in ("new", "active", "idle", "parked", "expired", "closed"):
        fill(store, make, "a", id_=state, state=state, used_s=100.0, ttl_s=60.0)
    assert store.sweep(now=160.0, log_retention_s=1e9) == []
    over = store.sweep(now=160.5, log_retention_s=1e9)
    assert [(s.id, s.state) for s in over] == [("idle", "expired"), ("parked", "expired")]
    assert store.get("idle") == over[0]
    assert len(store.path("idle")) == 1
    assert {s.id: s.state for s in store.list()} == {
        "new": "new",
        "active": "active",
        "idle": "expired",
        "parked": "expired",
        "expired": "expired",
        "closed": "closed",
    }
    assert store.sweep(now=161.0, log_retention_s=1e9) == []


def test_sweep_wipes_by_retention_but_never_an_active_session(store: SessionStore, make) -> None:
    for state in ("new", "active", "idle", "expired", "closed"):
        fill(store, make, "a", id_=state, state=state, used_s=100.0, ttl_s=float("inf"))
    fill(store, make, "a", id_="fresh", state="idle", used_s=500.0, ttl_s=1e6)
    over = store.sweep(now=601.0, log_retention_s=500.0)
    assert [(s.id, s.state) for s in over] == [("idle", "expired")]  # its KV must be given back, too
    assert {s.id for s in store.list()} == {"active", "fresh"}
    assert store.verify() == []


def test_a_message_of_20_mb(store: SessionStore, make) -> None:
    _, entries = fill(store, make, "x" * 20_000_000)
    assert store.path("s1") == entries
    assert store.search("s1", "x" * 50)[0].hash == entries[0].hash
    assert store.verify() == []


def test_a_path_of_10_000_entries(store: SessionStore, make) -> None:
    _, entries = fill(store, make, *(f"message {n}" for n in range(10_000)))
    assert store.path("s1") == entries
    store.branch(make.session("s2"), "s1", entries[-1].hash)
    assert store.path("s2") == entries


def test_threads_write_beside_each_other(store: SessionStore, make) -> None:
    fill(store, make, "shared")
    problems: list[BaseException] = []

    def work(name: str) -> None:
        try:
            session = make.session(name)
            store.create(session)
            entries = make.chain(*(f"{name} {n}" for n in range(40)))
            for entry in entries:
                session = replace(session, head=entry.hash)
                store.append(session, [entry])
                store.find([entry.hash])
                store.list()
            assert store.path(name) == entries
        except BaseException as problem:  # noqa: BLE001 - carried to the test's thread
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(f"w{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert len(store.list()) == 7
    assert store.verify() == []
