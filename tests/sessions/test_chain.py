"""Raw messages read as the wire reads them, so that hashes derived later are the hashes of entry."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsteward.errors import ConfigError
from kvsteward.sessions import MemoryStore, SqliteStore, open_store
from kvsteward.sessions.chain import message_of
from kvsteward.sessions.needles import needles

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(text, values, max_size=4), st.booleans())
def test_a_message_reads_as_orjson_reads_it(message: dict[str, object], ascii_: bool) -> None:
    raw = json.dumps(message, ensure_ascii=ascii_).encode()
    read, expected = message_of(raw), orjson.loads(raw)
    assert orjson.dumps(read) == orjson.dumps(expected)


@pytest.mark.parametrize(
    "number", ["18446744073709551615", "18446744073709551616", "-9223372036854775809", "-0", "1e5"]
)
def test_numbers_at_the_edge_of_64_bits(number: str) -> None:
    raw = f'{{"n":{number}}}'.encode()
    assert orjson.dumps(message_of(raw)) == orjson.dumps(orjson.loads(raw))


@pytest.mark.parametrize("raw", [b"[]", b"", b"{", b'{"a":NaN}', b'{"a":Infinity}', b"\xff", b"null"])
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        message_of(raw)


@given(text)
def test_needles_find_the_text_in_each_form(needle: str) -> None:
    forms = needles(needle)
    assert forms[0] == needle.encode()
    assert len(forms) == len(set(forms)) <= 7
    for ascii_ in (True, False):
        once = json.dumps({"content": needle}, ensure_ascii=ascii_)
        twice = json.dumps({"arguments": json.dumps([needle], ensure_ascii=ascii_)}, ensure_ascii=ascii_)
        for raw in (once.encode(), twice.encode()):
            assert any(form in raw for form in forms)


def test_open_store(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(open_store("memory:"), MemoryStore)
    for url, path in (
        (f"sqlite:///{tmp_path}/deep/er/a.db", "deep/er/a.db"),
        ("sqlite:///b.db", "b.db"),
        (f"{tmp_path}/c/d.db", "c/d.db"),
        ("./e:f.db", "e:f.db"),
    ):
        store = open_store(url)
        assert isinstance(store, SqliteStore)
        store.close()
        assert (tmp_path / path).stat().st_mode & 0o077 == 0
    for url in ("valkey:host", "redis:x", "sqlite:x", "sqlite://", "sqlite:///", "memory:x", ""):
        with pytest.raises(ConfigError, match=r"memory:, sqlite:///"):
            open_store(url)
