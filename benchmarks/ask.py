"""What the engine's model is worth where a policy has it asked: how often its answers stand the test, what they keep.

    python benchmarks/ask.py [--passages 12] [--limit 160] [--threads 1] [--quick] [--json]

On the embedded llama.cpp with its small model. Two parts:

prose    Passages of novels (../shared/data/texts) as a tool's result, four sentences with values planted in each. What
         later turns use are the planted values. Shown at the same limit of tokens: the extractive distillate, and what
         `trace: {prose: engine}` shows (the model's words where they stand the test, else the extractive one).
classes  Sentences of users with the class that a person gave them, six to a question, held to the schema and not:
         answers that can be used, and the share of classes that agree. Beside it: the rules, which take none of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Generator
from typing import Any

import orjson

from _texts import passages
from kvsteward.context.ask import Ask, Reply
from kvsteward.context.distill.base import Hints
from kvsteward.context.distill.registry import distil
from kvsteward.context.entry import FOOTER_TOKENS
from kvsteward.context.layout import Item, View
from kvsteward.context.marks import Policy
from kvsteward.context.memory import stands_in
from kvsteward.context.paraphrase import paraphrase
from kvsteward.context.plan import PlanRules
from kvsteward.context.tokens import Estimator
from kvsteward.context.unsure import classify
from kvsteward.engines.base import Engine, EngineRequest
from kvsteward.engines.registry import EngineSpec, create_engine
from kvsteward.gateway.asking import format_of, heard, said
from kvsteward.gateway.upstream import PATH

PASSAGE_CHARS = 3_600
QUESTION = "What was reported about the harbour, and what did it cost?"
PLANTED = (
    ("The report says that pump KX-{a} in hall {b} failed at night.", "KX-{a}", "{b}"),
    ("The repair of the crane was paid on 2024-03-{d} with {c} euros.", "2024-03-{d}", "{c}"),
    ("Ms Okonkwo keeps the keys under the number QZ{b}T in room {a}.", "QZ{b}T", "{a}"),
    ("The next ship, number {c}, brings the spare parts listed in parts/{a}.csv.", "{c}", "parts/{a}.csv"),
)
CLASSES = (
    ("I'd prefer a room on a quiet floor.", "plan"),
    ("Actually, I meant the second of the two offers.", "plan"),
    ("My budget is 900 euros for everything.", "plan"),
    ("We agreed on the morning train, not the late one.", "plan"),
    ("Ideally we leave before the school holidays.", "plan"),
    ("Let's go with the blue one.", "plan"),
    ("I can't be reached on Wednesdays.", "plan"),
    ("Please keep the answers short and in plain words.", "plan"),
    ("I changed my mind, I want the window seat instead.", "plan"),
    ("No later than the end of May, please.", "plan"),
    ("My daughter is allergic to nuts.", "plan"),
    ("I would like to hear the price in dollars each time.", "plan"),
    ("My flight number is BA 117 and lands before nine.", "fact"),
    ("The landlord, Mr Haddad, needs to have the keys, his number is 555-0147.", "fact"),
    ("The flat is within the ring road, at 14 Mill Lane.", "fact"),
    ("Our last order was number 77120, over 310 euros.", "fact"),
    ("The due date on the invoice is 14 April.", "fact"),
    ("My customer number is 40-2291, should you need it.", "fact"),
    ("I hope that you had a good weekend.", "trace"),
    ("That is more than I had thought, thank you.", "trace"),
    ("Let's see, one moment.", "trace"),
    ("I would rather not talk about the weather, ha.", "trace"),
    ("Over to you then.", "trace"),
    ("I wish that all calls were as quick as this.", "trace"),
)
_SIX = 6
_NUMBER = re.compile(r"\d[\w./-]*\d|\d")


def planted(count: int) -> list[tuple[str, list[str]]]:
    """(text, planted values)."""
    found = []
    for number, passage in enumerate(passages(count, PASSAGE_CHARS)):
        sentences = [" ".join(sentence.split()) for sentence in passage]
        given = {"a": 4711 + 31 * number, "b": 120 + 7 * number, "c": 1_250 + 13 * number, "d": 10 + number % 19}
        used = []
        for place, (sentence, *values) in enumerate(PLANTED, 1):
            sentences.insert(place * len(sentences) // (len(PLANTED) + 1), sentence.format(**given)[:-1])
            used += [value.format(**given) for value in values]
        found.append((". ".join(sentences) + ".", used))
    return found


async def put(engine: Engine, question: Ask, number: int) -> Reply:
    body: dict[str, Any] = {"messages": list(question.messages), "temperature": 0, "stream": True}
    body |= {"max_tokens": question.max_tokens, "stream_options": {"include_usage": True}}
    if question.schema is not None:
        body["response_format"] = format_of(question.purpose, question.schema)
    started = time.perf_counter()
    status, reader = await heard(engine, EngineRequest(PATH, orjson.dumps(body), f"b{number}"))
    if reader is None:
        sys.exit(f"the engine answered {status}")
    text, failed = said(reader)
    usage = reader.usage
    counts = (usage.prompt_tokens, usage.output_tokens) if usage else (0, 0)
    return Reply(text, reader.finish != "length", *counts, time.perf_counter() - started, failed)


async def driven(engine: Engine, questions: Generator[Ask, Reply, Any], number: int) -> tuple[Any, Reply | None]:
    try:
        reply = await put(engine, next(questions), number)
        questions.send(reply)
    except StopIteration as stop:
        return stop.value, locals().get("reply")
    raise AssertionError("it is one question")


async def prose(engine: Engine, count: int, limit: int) -> dict[str, Any]:
    estimator, room = Estimator(), limit - FOOTER_TOKENS
    kept: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    seconds, total, invented = [], 0, 0
    for number, (text, used) in enumerate(planted(count)):
        hints = Hints(QUESTION)
        plain = distil(text, room, hints, estimator.text).text
        (made, told), reply = await driven(
            engine,
            paraphrase(
                text, at="", hints=hints, room_tokens=room, context_tokens=4_096, mark="c0ffee00", estimator=estimator
            ),
            number,
        )
        answer = (reply.text if reply else None) or ""
        shown = made.text if made else plain
        total += len(used)
        for name, view in (("extractive", plain), ("model, unchecked", answer), ("shown", shown)):
            kept[name] += sum(stands_in(value, view) for value in used)
            tokens[name] += estimator.text(view)
        invented += any(not stands_in(n, text) for n in _NUMBER.findall(answer))
        reasons["used" if told.outcome == "used" else told.reason] += 1
        seconds.append(told.seconds)
        tokens["asked"] += told.tokens
        tokens["whole"] += estimator.text(text)
        if made:
            kept["model, where used"] += sum(stands_in(value, made.text) for value in used)
            kept["extractive, there"] += sum(stands_in(value, plain) for value in used)
    each = total // count
    return {
        "passages": count,
        "limit_tokens": limit,
        "used_answers": reasons["used"],
        "outcomes": dict(reasons.most_common()),
        "raw_answers_with_an_invented_number": invented,
        "values": total,
        "in_view_ratio": {name: round(kept[name] / total, 3) for name in ("extractive", "model, unchecked", "shown")},
        "in_view_ratio_where_used": {
            name: round(kept[name] / (each * reasons["used"]), 3) if reasons["used"] else None
            for name in ("model, where used", "extractive, there")
        },
        "tokens_each": {name: round(value / count) for name, value in tokens.items()},
        "seconds_each": round(sum(seconds) / count, 2),
    }


async def classes(engine: Engine) -> dict[str, Any]:
    policy = Policy(plan=PlanRules(unsure="engine"))
    marks = policy.marks(4_096, None)
    found: dict[str, Any] = {"sentences": len(CLASSES)}
    found["rules_agree"] = sum(gold == "trace" for _, gold in CLASSES)
    for structured in (True, False):
        usable = agree = asked = answers = 0
        given: Counter[str] = Counter()
        seconds = 0.0
        for start in range(0, len(CLASSES), _SIX):
            part = [CLASSES[(start + n * 7) % len(CLASSES)] for n in range(_SIX)]
            opening = {"role": "user", "content": "Hello."}
            messages = [opening, *({"role": "user", "content": text} for text, _ in part)]
            view = View(items=tuple(Item(f"{n:08x}", n, m, 9, 9) for n, m in enumerate(messages)))
            sorted_, reply = await driven(
                engine, classify(view, marks, policy, Estimator(), structured=structured), 100 + start
            )
            asked += 1
            seconds += reply.seconds if reply else 0.0
            if sorted_.asked.outcome != "used":
                continue
            usable += 1
            told = [c.given for n in range(1, _SIX + 1) for c in sorted_.items[f"{n:08x}"]]
            answers += len(told)
            given.update(told)
            agree += sum(a == gold for a, (_, gold) in zip(told, part, strict=True))
        found["schema" if structured else "plain words"] = {
            "questions": asked,
            "usable": usable,
            "classes": dict(given),
            "agree": agree,
            "of": answers,
            "seconds_each": round(seconds / asked, 2),
        }
    return found


def told(part: str, rows: dict[str, Any]) -> dict[str, Any]:
    """Printed as it comes: a run that is ended early has said something."""
    print(part)
    for key, value in rows.items():
        print(f"  {key:36} {value}", flush=True)
    return rows


async def measured(args: argparse.Namespace) -> dict[str, Any]:
    engine = create_engine(EngineSpec(kind="embedded", slots=1, context_tokens=4_096, threads=args.threads))
    await engine.start()
    try:
        count = 6 if args.quick else args.passages
        found = {"classes": told("classes", await classes(engine))}
        return {**found, "prose": told("prose", await prose(engine, count, args.limit))}
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=12)
    parser.add_argument("--limit", type=int, default=160, help="tokens of a tool result; the note takes some")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="six passages")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = parser.parse_args()
    found = asyncio.run(measured(args))
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
