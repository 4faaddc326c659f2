"""What selective context saves of long prose, and what it makes a turn wait, on a real vLLM.

    python benchmarks/selective.py [--python VLLM_PYTHON] [--model DIR] [--ratio 0.3] [--quick] [--json]

Passages of novels (../shared/data/texts), one sentence of another kind planted in the middle of each. Printed: tokens
before and after by the estimate, seconds that the engine took for the log-probabilities, and in how many passages the
planted sentence is kept by selective context and by the distiller for prose that asks nobody, in the same room.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _serving import end_when_told, free_url, process
from _texts import passages
from kvsteward.context.distill.base import Hints
from kvsteward.context.distill.registry import distil
from kvsteward.context.selective import Pieces, Selected, select
from kvsteward.context.tokens import Estimator
from kvsteward.engines.http import HttpOptions
from kvsteward.engines.vllm import VllmEngine

PLANTED = (
    "The night shift reports that the third cooling pump leaks again.",
    "A courier left the parcel with the baker next door.",
    "Our test suite fails whenever the clock is set to winter time.",
    "The landlord wants the keys back before noon.",
    "Someone has changed the password of the printer in the hall.",
    "The ferry will not sail while the wind is from the west.",
)
QUESTION = "What happened?"


def planted(count: int, chars: int) -> list[tuple[str, str]]:
    """(text, planted sentence)."""
    found = []
    for number, sentences in enumerate(passages(count, chars)):
        sentence = PLANTED[number % len(PLANTED)]
        sentences.insert(len(sentences) // 2, sentence[:-1])
        found.append((". ".join(sentences) + ".", sentence))
    return found


async def measured(url: str, texts: list[tuple[str, str]], ratio: float) -> list[dict[str, Any]]:
    engine, estimator = VllmEngine(HttpOptions(url=url)), Estimator()
    await engine.start()
    rows = []
    try:
        for text, sentence in texts:
            room = int(estimator.text(text) * ratio)
            questions = select(
                text, question=QUESTION, mentions=frozenset(), ratio=ratio, room_tokens=room, estimator=estimator
            )
            answer: Pieces | None = None
            started = time.perf_counter()
            while True:
                try:
                    question = questions.send(answer)
                except StopIteration as stop:
                    selected: Selected | None = stop.value
                    break
                answer = await engine.prompt_logprobs(question.before + question.text, model="smol", request_id="b")
            seconds = time.perf_counter() - started
            if selected is None:
                sys.exit("the engine's answer could not be used")
            plain = distil(text, room, Hints(QUESTION), estimator.text).text
            rows.append(
                {
                    "tokens": estimator.text(text),
                    "kept_tokens": estimator.text(selected.text),
                    "seconds": round(seconds, 3),
                    "kept": sentence[:-1] in selected.text,
                    "kept_by_distiller": sentence[:-1] in plain,
                }
            )
    finally:
        await engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=".venv-vllm/bin/python", help="of an environment that has vLLM")
    parser.add_argument("--model", default=".venv-vllm/smollm2")
    parser.add_argument("--ratio", type=float, default=0.3)
    parser.add_argument("--quick", action="store_true", help="six passages in place of 24")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = parser.parse_args()
    end_when_told()
    texts = planted(6 if args.quick else 24, 8_000)
    with tempfile.TemporaryDirectory(prefix="kvsteward-selective-") as name:
        url, port = free_url()
        command = [args.python, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model, "--port", str(port)]
        command += ["--served-model-name", "smol", "--max-model-len", "4096", "--enforce-eager", "--host", "127.0.0.1"]
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with process(command, Path(name) / "vllm.log", url, 300, **env):
            rows = asyncio.run(measured(url, texts, args.ratio))
    tokens, seconds = sum(r["tokens"] for r in rows), sum(r["seconds"] for r in rows)
    found = {
        "passages": len(rows),
        "ratio": args.ratio,
        "tokens": tokens,
        "kept_tokens": sum(r["kept_tokens"] for r in rows),
        "seconds_each": round(seconds / len(rows), 2),
        "tokens_per_s": round(tokens / seconds),
        "planted_kept": sum(r["kept"] for r in rows),
        "planted_kept_by_distiller": sum(r["kept_by_distiller"] for r in rows),
    }
    for key, value in found.items():
        print(f"{key:28} {value}")
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
