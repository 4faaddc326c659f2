"""What recall finds by words, by meaning and by both, in recorded agent conversations.

    python benchmarks/recall.py [--quick] [--json] [--url URL --model NAME | --gguf FILE] [--conversations N]

A fact is a value of older history that a recorded turn really uses (shared/tools/context_facts.py). The whole history
before that turn is in the log; it is searched, and a hit is a message that holds the value. Two kinds of query:

    value   the value itself, as a model asks that knows what it looks for
    turn    what the turn says, its own words and the names of its calls and arguments, without any of its values: the
            question of a model that knows what it needs, but not what it is. Written by nobody for this purpose

Words is the store's own search (SQLite), fused what the gateway does with `--embeddings` (both in
turn), meaning its second ranking alone. Without --url, llama.cpp serves the embeddings, with the mean of the states of
--gguf (default: the small chat model of the tests, which was not trained for it).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson

from _facts import SHARED, definition
from kvsteward.context.recall import Ask
from kvsteward.engines.embedded import default_model
from kvsteward.engines.embeddings import EmbeddingOptions
from kvsteward.engines.scripted import ScriptedEngine
from kvsteward.gateway.app import Steward
from kvsteward.gateway.recall import find
from kvsteward.gateway.settings import Settings
from kvsteward.sessions import Entry, Session, open_store
from kvsteward.sessions.words import searched_text
from kvsteward.wire import fingerprint

SERVER = Path(__file__).resolve().parents[1] / "tests" / "e2e" / "embeddings_server.py"
TURNS, FACTS = 24, 5
"""Of one conversation, and of one turn."""
FEWEST = 6
"""Queries of a conversation that is taken."""
WAYS = ("words", "meaning", "fused")


@dataclass(frozen=True, slots=True)
class Question:
    kind: str
    query: str
    value: str
    head: str


@dataclass(frozen=True, slots=True)
class Conversation:
    id: str
    entries: tuple[Entry, ...]
    questions: tuple[Question, ...]


def conversations(count: int, most_chars: int) -> list[Conversation]:
    """The first of each file in turn, of those that are not longer, until there are `count`."""
    facts = definition()
    files = sorted((SHARED / "data" / "agent").glob("*.jsonl"))
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    found: list[Conversation] = []
    for number in range(max(map(len, rows))):
        for file in rows:
            if number < len(file) and len(found) < count:
                messages = file[number]["messages"]
                if sum(len(facts.mview(m)) for m in messages) <= most_chars:
                    one = conversation(facts, file[number])
                    found += [one] if len(one.questions) >= FEWEST else []
    return found


def conversation(facts: ModuleType, row: dict[str, Any]) -> Conversation:
    messages, parent, entries = row["messages"], fingerprint.root(), list[Entry]()
    for depth, message in enumerate(messages, 1):
        hash_ = fingerprint.link(parent, message)
        entries.append(Entry(hash_, parent, depth, "client", orjson.dumps(message), float(depth)))
        parent = hash_
    tools = {tool["function"]["name"] for tool in row.get("tools") or () if "function" in tool}
    turns = [(t, facts.facts(messages, t, tools)) for t, m in enumerate(messages) if m["role"] == "assistant"]
    turns = [(t, sorted(held)) for t, held in turns if held]
    questions = list[Question]()
    for t, held in turns[:: max(1, -(-len(turns) // TURNS))]:
        query = asked(facts, messages[t])
        for value in held[:FACTS]:
            questions.append(Question("value", value, value, entries[t - 1].hash))
            if len(query.split()) >= 3:
                questions.append(Question("turn", query, value, entries[t - 1].hash))
    return Conversation(row["id"], tuple(entries), tuple(questions))


def asked(facts: ModuleType, message: dict[str, Any]) -> str:
    """What a turn says, without the values in it."""
    words = [facts.ctext(message)]
    for call in message.get("tool_calls") or ():
        words.append(call["function"]["name"].replace("_", " "))
        with contextlib.suppress(json.JSONDecodeError, TypeError):
            arguments = json.loads(call["function"]["arguments"])
            words += [name.replace("_", " ") for name in arguments] if isinstance(arguments, dict) else []
    text = " ".join(words)
    for value in sorted(facts.turn_values(message), key=len, reverse=True):
        text = text.replace(value, " ")
    return " ".join(re.sub(r"[^\w' -]", " ", text).split()[:48])


async def searched(
    steward: Steward, found: Sequence[Conversation], holds: Any, show: Any
) -> tuple[dict[str, dict[str, list[int]]], list[float], float]:
    """The place of the first message that holds the value (0: none), by kind and way; seconds of each fused search;
    seconds that embedding took."""
    places: dict[str, dict[str, list[int]]] = {kind: {way: [] for way in WAYS} for kind in ("value", "turn")}
    times, embedding_s = list[float](), 0.0
    librarian, store = steward.librarian, steward.desk.store
    assert librarian is not None
    for number, one in enumerate(found):
        now = time.time()
        session = Session(one.id, "", "new", fingerprint.root(), now, now, 3_600.0)
        store.create(session)
        store.append(replace(session, head=one.entries[-1].hash), one.entries)
        started = time.perf_counter()
        librarian.after_turn(one.id)
        while librarian.waiting:  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.05)
        embedding_s += time.perf_counter() - started
        for question in one.questions:
            by_words = store.lookup(one.id, question.query, head=question.head, limit=20)
            started = time.perf_counter()
            fused, how = await find(steward, one.id, question.head, Ask(query=question.query))
            times.append(time.perf_counter() - started)
            if how != "fused":
                sys.exit(f"the endpoint did not answer: {how}")
            sought = await librarian.search(one.id, question.query, 100)
            near = store.on_path(one.id, question.head, sought.hashes)
            by_meaning = [store.item(one.id, h) for h in sought.hashes if h in near][:20]
            for way, entries in zip(WAYS, (by_words, by_meaning, fused), strict=True):
                hits = [holds(searched_text(e.raw), question.value) for e in entries]
                places[question.kind][way].append(hits.index(True) + 1 if any(hits) else 0)
        show(f"{number + 1}/{len(found)} {one.id}: {len(one.entries)} messages, {len(one.questions)} queries")
    return places, times, embedding_s


def share(places: Sequence[int], most: int) -> float:
    return sum(0 < place <= most for place in places) / len(places) if places else 0.0


@contextlib.contextmanager
def served(gguf: Path) -> Iterator[str]:
    """llama.cpp's endpoint for a file."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, str(SERVER), str(gguf), str(port)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                    break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if child.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"llama.cpp did not start with {gguf}")
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.communicate()


async def measure(options: EmbeddingOptions, found: Sequence[Conversation], show: Any) -> dict[str, Any]:
    folder = tempfile.TemporaryDirectory()
    store = open_store(str(Path(folder.name) / "log.db"))
    steward = Steward(Settings(embeddings=options), [ScriptedEngine()], store)
    await steward.start()
    try:
        places, times, embedding_s = await searched(steward, found, definition().has, show)
        sample = steward.telemetry.registry.get_sample_value
        stored = sample("kvsteward:embedded_texts_total", {"outcome": "stored"})
    finally:
        await steward.stop()
        folder.cleanup()
    return {
        "model": options.model,
        "conversations": len(found),
        "messages": sum(len(one.entries) for one in found),
        "passages": int(stored or 0),
        "embedding_s": round(embedding_s, 1),
        "search_p50_ms": round(1e3 * statistics.median(times), 1),
        "queries": {
            kind: {
                "count": len(by_way["words"]),
                **{
                    way: {
                        "hit_at_1": round(share(by_way[way], 1), 3),
                        "hit_at_5": round(share(by_way[way], 5), 3),
                        "mrr": round(statistics.mean([1 / p if p else 0.0 for p in by_way[way]] or [0.0]), 3),
                    }
                    for way in WAYS
                },
            }
            for kind, by_way in places.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few and short conversations")
    parser.add_argument("--json", action="store_true", help="print one JSON object, last")
    parser.add_argument("--url", help="an endpoint that runs already")
    parser.add_argument("--model", help="the model that it is asked for")
    parser.add_argument("--gguf", type=Path, help="a model for llama.cpp")
    parser.add_argument("--conversations", type=int, help="how many. Default: 20, 4 with --quick")
    parser.add_argument("--chars", type=int, help="the longest that is taken. Default: 40000, 15000 with --quick")
    given = parser.parse_args()
    if given.url and (given.gguf or not given.model):
        parser.error("--url goes with --model, and without --gguf")
    count = given.conversations or (4 if given.quick else 20)
    found = conversations(count, given.chars or (15_000 if given.quick else 40_000))
    gguf = given.gguf or Path(default_model())

    def show(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with served(gguf) if not given.url else contextlib.nullcontext(given.url) as url:
        options = EmbeddingOptions(url, given.model or gguf.stem, timeout_s=60.0, query_timeout_s=30.0)
        result = asyncio.run(measure(options, found, show))
    print(f"{'':8}{'queries':>9}" + "".join(f"{way:>22}" for way in WAYS))
    for kind, row in result["queries"].items():
        cells = "".join(f"{row[w]['hit_at_1']:>8.3f}{row[w]['hit_at_5']:>7.3f}{row[w]['mrr']:>7.3f}" for w in WAYS)
        print(f"{kind:8}{row['count']:>9}{cells}")
    print("(hit@1, hit@5, mean reciprocal rank)")
    if given.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
