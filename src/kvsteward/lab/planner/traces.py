"""Recorded traces as turns: WEKA coding sessions, Mooncake, Azure, and our own log. What a file is, it says itself.

Knows the files' layouts, not what is planned from them. Invariant: bounded in files, lines, bytes and turns; a line
of another shape is a ConfigError that names it. Contexts are prompt tokens as recorded.

Layouts: WEKA agent traces (JSON by session; compact: rows of `cols`, where a request shares `shared_prefix_blocks`
blocks of 64 tokens with the one `parent_back` before it; sub-agents nested); Mooncake (Qin 2024: `hash_ids` of
512-token blocks, global); Azure LLM inference 2023 (TIMESTAMP, ContextTokens, GeneratedTokens).
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from kvsteward.errors import ConfigError
from kvsteward.lab.planner.ours import our_turns
from kvsteward.ledger.plan import Turn

MOST_TURNS = 2_000_000
MOST_FILES = 10_000
MOST_FILE_BYTES = 256 * 2**20
MOST_LINE_BYTES = 16 * 2**20
MOST_TEXT_BYTES = 4 * 2**30
MOONCAKE_BLOCK_TOKENS = 512
_SQLITE = b"SQLite format 3\0"
_AZURE = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_LAYOUTS = "WEKA (a folder of *.json, or weka_compact.jsonl.gz), Mooncake jsonl, Azure csv, or a kvsteward store"


@dataclass(frozen=True, slots=True)
class Trace:
    """The turns of a file. `sessions` is None where the file does not tell sessions apart."""

    kind: str
    turns: tuple[Turn, ...]
    sessions: int | None


def read_trace(path: Path) -> Trace:
    """The trace at `path`. ConfigError if there is none, it has another shape, or it is longer than the bounds."""
    if path.is_dir():
        return _trace("WEKA", _weka_folder(path))
    if not path.is_file():
        raise ConfigError(f"there is no trace at '{path}'", hint=f"Known: {_LAYOUTS}.")
    with path.open("rb") as file:
        start = file.read(len(_SQLITE))
    if start == _SQLITE:
        return _trace("kvsteward log", our_turns(path))
    if path.suffix == ".csv":
        return _trace("Azure", _azure(path), known=False)
    if path.suffix == ".json":
        return _trace("WEKA", _weka_file(path))
    return _lines_trace(path)


def _lines_trace(path: Path) -> Trace:
    rows = _rows(path)
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"{path} is empty")
    whole = itertools.chain([first], rows)
    where, row = first
    if "input_length" in row:
        return _trace("Mooncake", _mooncake(whole), known=False)
    if "requests" in row:
        return _trace("WEKA", (turn for at, item in whole for turn in _weka(item, at)))
    raise ConfigError(f"{where}: the trace has another shape: fields {_some(row)}", hint=f"Known: {_LAYOUTS}.")


def _trace(kind: str, turns: Iterator[Turn], *, known: bool = True) -> Trace:
    listed = tuple(itertools.islice(turns, MOST_TURNS + 1))
    if len(listed) > MOST_TURNS:
        raise ConfigError(f"the trace has more than {MOST_TURNS:,} turns: give a part of it")
    if not listed:
        raise ConfigError(f"the {kind} trace has no turn")
    alive = {turn.session.partition("/")[0] for turn in listed}  # a sub-agent runs inside its session
    return Trace(kind, listed, len(alive) if known else None)


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with path.open("rb") as file:
            source: IO[bytes] = file
            if path.suffix == ".gz":
                source = cast("IO[bytes]", gzip.GzipFile(fileobj=file))
            yield from _parsed(source, path)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ConfigError(f"{path} is no whole gzip file: {error}") from error


def _parsed(file: IO[bytes], path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    total = 0
    for number in itertools.count(1):
        line = file.readline(MOST_LINE_BYTES + 1)
        total += len(line)
        if not line:
            return
        where = f"{path}:{number}"
        if len(line) > MOST_LINE_BYTES or total > MOST_TEXT_BYTES:
            raise ConfigError(f"{where}: the trace is larger than its bounds (a line of 16 MiB, 4 GiB in all)")
        if line.strip():
            yield where, _object(line, where)


def _object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}", hint=f"Known: {_LAYOUTS}.") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where} holds no JSON object", hint=f"Known: {_LAYOUTS}.")
    return row


def _weka_folder(folder: Path) -> Iterator[Turn]:
    files = sorted(itertools.islice(folder.glob("*.json"), MOST_FILES + 1))
    if not files or len(files) > MOST_FILES:
        raise ConfigError(f"a trace folder holds 1 to {MOST_FILES:,} *.json files, not {len(files):,}: '{folder}'")
    for file in files:
        yield from _weka_file(file)


def _weka_file(path: Path) -> Iterator[Turn]:
    if path.stat().st_size > MOST_FILE_BYTES:
        raise ConfigError(f"{path} is larger than 256 MiB: that is no session")
    yield from _weka(_object(path.read_bytes(), str(path)), str(path))


@dataclass(frozen=True, slots=True)
class _Request:
    input_tokens: int
    output_tokens: int
    think_s: float
    cached_tokens: int


def _weka(session: dict[str, Any], where: str) -> Iterator[Turn]:
    """The turns of one session, then those of its sub-agents, each a context of its own."""
    requests, block = session.get("requests"), session.get("block_size", 64)
    name = str(session.get("id", where)).replace("/", "-")
    if not isinstance(requests, list) or type(block) is not int or block < 1:
        raise ConfigError(f"{where} is no WEKA session: `requests` must be a list", hint=f"Known: {_LAYOUTS}.")
    columns = session.get("cols")
    try:
        own = [row for row in requests if not _nested(row)]
        yield from _turns(name, _compact(own, columns, block) if columns else _original(own, block))
        for number, agent in enumerate(row for row in requests if _nested(row)):
            inner = agent.get("sub", agent.get("requests"))
            read = _compact(inner, columns, block) if columns else _original(inner, block)
            yield from _turns(f"{name}/{number}", read)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: a request has another shape: {error!r}", hint=f"Known: {_LAYOUTS}.") from error


def _nested(row: Any) -> bool:
    return isinstance(row, dict) and ("sub" in row or "requests" in row)


def _compact(rows: list[list[Any]], columns: list[str], block: int) -> Iterator[_Request]:
    at = {name: columns.index(name) for name in ("in", "out", "think_time", "shared_prefix_blocks")}
    for row in rows:
        yield _Request(
            _count(row[at["in"]]),
            _count(row[at["out"]]),
            float(row[at["think_time"]] or 0),
            _count(row[at["shared_prefix_blocks"]]) * block,
        )


def _original(rows: list[dict[str, Any]], block: int) -> Iterator[_Request]:
    seen: set[int] = set()
    for row in rows:
        ids = row.get("hash_ids") or []
        shared = sum(1 for _ in itertools.takewhile(seen.__contains__, ids))
        seen.update(ids)
        yield _Request(_count(row["in"]), _count(row["out"]), float(row.get("think_time") or 0), shared * block)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count of tokens")
    return value


def _turns(session: str, requests: Iterator[_Request]) -> Iterator[Turn]:
    """`think_time` is what passed before a request: the pause of the turn before."""
    listed = list(requests)
    pauses = [*(max(0.0, later.think_s) for later in listed[1:]), 0.0]
    for request, pause in zip(listed, pauses, strict=False):
        cached = min(request.cached_tokens, request.input_tokens)
        yield Turn(session, request.input_tokens, request.output_tokens, cached, pause)


def _mooncake(rows: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[Turn]:
    """Each request a turn of its own: blocks are shared across sessions too, so that these cannot be told apart."""
    seen: set[int] = set()
    for where, row in rows:
        try:
            ids, tokens, answer = row["hash_ids"], _count(row["input_length"]), _count(row["output_length"])
            shared = sum(1 for _ in itertools.takewhile(seen.__contains__, ids)) * MOONCAKE_BLOCK_TOKENS
            seen.update(ids)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{where}: a Mooncake request has another shape: {error!r}") from error
        yield Turn(where, tokens, answer, min(shared, tokens))


def _azure(path: Path) -> Iterator[Turn]:
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        if header != _AZURE:
            raise ConfigError(f"{path} has the columns {header[:8]}, not {_AZURE}", hint=f"Known: {_LAYOUTS}.")
        try:
            for row in reader:
                _time, tokens, answer = row
                yield Turn(f"{path}:{reader.line_num}", _count(int(tokens)), _count(int(answer)))
        except (ValueError, csv.Error) as error:
            raise ConfigError(f"{path}:{reader.line_num}: a row has another shape: {error}") from error


def _some(row: dict[str, Any]) -> str:
    return ", ".join(list(row)[:8]) or "none"
