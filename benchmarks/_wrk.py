"""The load: wrk (https://github.com/wg/wrk) with a script that plays small conversations.

A thread keeps a row of conversations and goes round: each request is the next turn of one of them, with the whole
history, as agents send it. After `TURNS` turns a new conversation takes the place. The upstream's answer is always the
same text, so that the script can write the history without reading the answers. Texts are ours.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from _upstream import ANSWER, MODEL

TURNS: Final = 4
SYSTEM: Final = (
    "You are a careful assistant of a small team that runs a data platform. Answer briefly, name the file or the "
    "table that you speak of, and say so when you are not sure. Use the tools that you are given before you guess. "
    "Never change production data without being asked; explain what a command does before you propose it. "
    "Dates are ISO 8601, sizes are MiB, durations are seconds."
)
QUESTION: Final = (
    "The nightly job of pipeline {name} (step {turn}) took twice as long as last week. Its log says that 3 of 48 "
    "partitions were read again after a timeout. What would you look at first, and which figure would tell?"
)


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of wrk measured."""

    requests: int
    seconds: float
    failed: int
    """Answers with another status than 200, and socket errors."""
    p50_ms: float
    p99_ms: float

    @property
    def per_second(self) -> float:
        return self.requests / self.seconds


_SCRIPT: Final = """
local thread_count = 0
function setup(thread)
  thread:set("id", thread_count)
  thread_count = thread_count + 1
end
local turns, names, history, at, serial = {}, {}, {}, 0, 0
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
function request()
  at = at % SLOTS + 1
  local t = (turns[at] or TURNS) + 1
  if t > TURNS then
    t, serial = 1, serial + 1
    names[at] = RUN .. "-" .. id .. "-" .. serial
    history[at] = SYSTEM
  else
    history[at] = history[at] .. ASSISTANT
  end
  turns[at] = t
  history[at] = history[at] .. ASK_1 .. names[at] .. ASK_2 .. t .. ASK_3
  return wrk.format(nil, nil, nil, HEAD .. history[at] .. TAIL)
end
function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format('{"requests":%d,"duration_us":%d,"failed":%d,"p50_us":%d,"p99_us":%d}\\n',
    summary.requests, summary.duration, e.connect + e.read + e.write + e.status + e.timeout,
    latency:percentile(50), latency:percentile(99)))
end
"""


def body(name: str, *, stream: bool) -> bytes:
    """The first turn of a conversation, as the script sends it."""
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION.format(name=name, turn=1)},
    ]
    return json.dumps({"model": MODEL, "stream": stream, "max_tokens": 256, "messages": messages}).encode()


def script(*, stream: bool, slots: int) -> str:
    """The Lua script of one run. Its conversations have names of their own, so that no two runs share a session."""
    before, middle, after = QUESTION.replace("{turn}", "{name}").split("{name}")
    values: dict[str, str | int] = {
        "SLOTS": slots,
        "TURNS": TURNS,
        "RUN": uuid.uuid4().hex[:8],
        "HEAD": f'{{"model":"{MODEL}","stream":{json.dumps(stream)},"max_tokens":256,"messages":[',
        "TAIL": "]}",
        "SYSTEM": json.dumps({"role": "system", "content": SYSTEM}),
        "ASSISTANT": "," + json.dumps({"role": "assistant", "content": ANSWER}),
        "ASK_1": ',{"role":"user","content":' + json.dumps(before)[:-1],
        "ASK_2": json.dumps(middle)[1:-1],
        "ASK_3": json.dumps(after)[1:] + "}",
    }
    lines = [f"local {name} = {value if isinstance(value, int) else _lua(value)}" for name, value in values.items()]
    return "\n".join(lines) + _SCRIPT


def _lua(text: str) -> str:
    return f"[==[{text}]==]"


def require() -> str:
    """The path of wrk. Ends the program with a message if there is none."""
    found = shutil.which("wrk")
    if found is None:
        sys.exit("this benchmark needs wrk (Debian and Ubuntu: apt-get install -y wrk; macOS: brew install wrk)")
    return found


def run(url: str, *, stream: bool, connections: int, seconds: float, folder: Path) -> Load:
    """One run against `url`. Raises RuntimeError where wrk fails or an answer was an error."""
    path = folder / "load.lua"
    path.write_text(script(stream=stream, slots=4 * connections))
    command = [require(), "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "20s"]
    command += ["-s", str(path), f"{url}/v1/chat/completions"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
    if done.returncode != 0 or line is None:
        raise RuntimeError(f"wrk failed: {done.stderr or done.stdout}")
    told = json.loads(line)
    load = Load(
        told["requests"], told["duration_us"] / 1e6, told["failed"], told["p50_us"] / 1000, told["p99_us"] / 1000
    )
    if load.failed or not load.requests:
        raise RuntimeError(f"{load.failed} of {load.requests} requests to {url} failed: {done.stdout}")
    return load
