"""Recorded sessions, or sessions in a circle, on a real vLLM: its own free list, kvsteward's connector, and the oracle.

    VLLM_PYTHON benchmarks/retention_order.py --model DIR [--order weka|circle] [--pools 0.15,0.25,0.4]
        [--kinds stock,ours,stops,finals] [--layers 1] [--quick] [--json]

`weka`: coding-agent sessions (../shared/data/traces/weka), `--alive` at once, in the order of their requests. The
connector's clock shows the recorded times (a turn ends when the next one begins, if not before), so pauses are as
long as they were and nobody waits for them; `--clock wall` leaves it alone: then a pause is as long as the other
sessions' work in it. All lengths are divided by one number so that the longest prompt fits `--context`; what two
requests share is scaled alike. `circle`: `--sessions` take turns, each with its whole history and 60 tokens more, and
answers of one token; the recorded clock shows a turn a second. Prompts are token ids.
`--pools`: sizes as shares of what live sessions hold at their peak, so 0.5 is a working set of 2 x the pool.

`ours` is told nothing but the session's id, `stops` also why each turn stopped (as a gateway tells it), `finals` also
which turn of a session was the last. `warm` is `finals` with a `learned_path`: what a replay of the sessions that are
not played has learned, as after a restart. Oracle: Belady on blocks, simulated on the same turns; LRU is simulated
too, to be compared with stock. The engine runs in this process, one after the other. `--layers` cuts the model and
leaves its weights random: what is reused is the same, and more turns fit the time. With `--simulate` there is no vLLM.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from kvsteward.kv.vllm import learned
from kvsteward.policy.returns import Returns
from retention_engine import BLOCK_TOKENS, CONNECTOR
from retention_sim import LRU, Learned, Oracle, Policy, Request, Run, replay, trace

WEKA = Path(__file__).resolve().parents[1] / ".." / "shared" / "data" / "traces" / "weka" / "weka_compact.jsonl.gz"
WEKA_BLOCK = 64
STOPS = {"tool_use": "tool_calls", "end_turn": "stop"}
FIRST_ID, LAST_ID = 1000, 40000
GROWTH_TOKENS = 60
TICK_S = 1e-6
PROGRESS_TURNS = 250


class Turn(NamedTuple):
    """`request` in blocks of the engine; `prompt` token ids."""

    request: Request
    prompt: tuple[int, ...]


def scale(requests: Sequence[Request], context_tokens: int) -> float:
    return (context_tokens - 8) / (max(r.blocks for r in requests) * WEKA_BLOCK)


def scaled(requests: Sequence[Request], ratio: float) -> list[Turn]:
    """The requests with all lengths multiplied by one number, one after the other."""
    made: dict[tuple[str, int], tuple[int, ...]] = {}
    found: list[Turn] = []
    for r, after in zip(requests, [*requests[1:], None], strict=True):
        head = made.get((r.session, r.parent), ())[: int(r.shared * WEKA_BLOCK * ratio)]
        fresh = max(1, int(r.blocks * WEKA_BLOCK * ratio) - len(head))
        ends = min(r.ends, after.t - TICK_S) if after else r.ends
        output = max(1, int(r.output * ratio))
        found.append(_turn(r._replace(ends=max(r.t, ends), output=output), head, fresh))
        made[r.session, r.number] = found[-1].prompt
    return found


def circle(sessions: int, rounds: int, tokens: int) -> list[Turn]:
    """Each of the sessions in turn; histories begin with `tokens`."""
    found: list[Turn] = []
    for at in range(sessions * rounds):
        name, number = f"s{at % sessions}", at // sessions
        request = Request(at, name, number, number - 1, 0, 0, at + 0.5, "end_turn", number == rounds - 1, 1)
        head = found[at - sessions].prompt if number else ()
        found.append(_turn(request, head, GROWTH_TOKENS if number else tokens))
    return found


def _turn(request: Request, head: tuple[int, ...], fresh: int) -> Turn:
    rng = random.Random(f"{request.session} {request.number}")
    prompt = head + tuple(rng.randrange(FIRST_ID, LAST_ID) for _ in range(fresh))
    whole, shared = max(1, len(prompt) // BLOCK_TOKENS), len(head) // BLOCK_TOKENS
    return Turn(request._replace(shared=shared, blocks=whole), prompt)


def taught(requests: Sequence[Request], ratio: float) -> Returns:
    """What a scheduler has learned from these requests, their lengths scaled."""
    teacher = Learned(finals=True)
    for r in requests:
        blocks = max(1, int(r.blocks * WEKA_BLOCK * ratio) // BLOCK_TOKENS)
        teacher.began(Run(r._replace(blocks=blocks), 0, blocks), r.t, 0)
    teacher.settle(max(r.ends for r in requests))
    return teacher.returns


def peak_blocks(requests: Sequence[Request]) -> int:
    """The most that sessions which are not over hold at once, each its newest path."""
    held: dict[str, int] = {}
    peak = 0
    for r in requests:
        held[r.session] = r.blocks
        peak = max(peak, sum(held.values()))
        if r.last:
            del held[r.session]
    return peak


@contextmanager
def recorded_clock() -> Iterator[SimpleNamespace]:
    """The connector's clock is what `now` says; a turn that ends sets it to `ends`."""
    from kvsteward.kv.vllm import connector

    clock = SimpleNamespace(now=0.0, ends=0.0)
    finish = connector.KVStewardConnector.request_finished_all_groups

    def finished(self: Any, *given: Any, **named: Any) -> Any:
        clock.now = clock.ends
        return finish(self, *given, **named)

    with (
        mock.patch.object(connector, "time", SimpleNamespace(monotonic=lambda: clock.now)),
        mock.patch.object(connector.KVStewardConnector, "request_finished_all_groups", finished),
    ):
        yield clock


def play(played: Sequence[Turn], kind: str, blocks: int, options: argparse.Namespace, warm: Path) -> tuple[int, float]:
    """(cached tokens of all turns, seconds) on an engine of its own."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"  # vLLM does so itself where there is a connector
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    more: dict[str, Any] = {}
    if kind != "stock":
        known = {"learned_path": str(warm)} if kind == "warm" else {}
        more["kv_transfer_config"] = {**CONNECTOR, "kv_connector_extra_config": known}
    if options.layers:
        more |= {"hf_overrides": {"num_hidden_layers": options.layers}, "load_format": "dummy"}
    arguments = EngineArgs(
        model=options.model,
        max_model_len=max(len(turn.prompt) for turn in played) + 2,
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=blocks,
        enable_prefix_caching=True,
        disable_log_stats=True,
        **more,
    )
    recorded = options.clock == "recorded" and kind != "stock"
    with recorded_clock() if recorded else nullcontext(SimpleNamespace()) as clock:
        engine = LLMEngine.from_engine_args(arguments)
        return _played(engine, played, kind, clock)


def _played(engine: Any, played: Sequence[Turn], kind: str, clock: SimpleNamespace) -> tuple[int, float]:
    from vllm import SamplingParams

    cached, began = 0, time.monotonic()
    try:
        for number, turn in enumerate(played):
            clock.now, clock.ends = turn.request.t, turn.request.ends
            extra = {"kv_transfer_params": {"kvsteward": told}} if (told := _told(kind, turn.request)) else None
            params = SamplingParams(max_tokens=turn.request.output, ignore_eos=True, temperature=0.0, extra_args=extra)
            prompt: Any = {"prompt_token_ids": list(turn.prompt)}
            engine.add_request(str(number), prompt, params, session_id=turn.request.session)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    cached += (output.num_cached_tokens or 0) if output.finished else 0
            if number % PROGRESS_TURNS == PROGRESS_TURNS - 1:
                print(f"  {kind}: {number + 1} turns, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    finally:
        engine.engine_core.shutdown()
        del engine
        gc.collect()
    return cached, time.monotonic() - began


def _told(kind: str, request: Request) -> dict[str, Any] | None:
    hint: dict[str, Any] = {}
    if kind in ("stops", "finals", "warm") and request.stop in STOPS:
        hint["stop"] = STOPS[request.stop]
    if kind in ("finals", "warm") and request.last:
        hint["final"] = True
    return {"version": 1, **hint} if hint else None


def handed_on(requests: Sequence[Request], ratio: float) -> Returns:
    """As an engine finds it that begins with the file of another one."""
    fresh = Returns()
    fresh.take(taught(requests, ratio).rows())
    return fresh


def simulated(played: Sequence[Turn], blocks: int, policy: Policy) -> float:
    """Share of prompt tokens reused, as vLLM counts: whole blocks; one block is its null block."""
    asked = sum(len(turn.prompt) for turn in played) / BLOCK_TOKENS
    return replay([turn.request for turn in played], blocks - 1, policy, held=True).reused / asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--order", choices=("weka", "circle"), default="weka")
    parser.add_argument("--pools", default="0.15,0.25,0.4")
    parser.add_argument("--kinds", default="stock,ours,stops,finals")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--alive", type=float, default=50.0)
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--turns", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5, help="of a circle")
    parser.add_argument("--tokens", type=int, default=264, help="that a history in a circle begins with")
    parser.add_argument("--context", type=int, default=3000)
    parser.add_argument("--clock", choices=("recorded", "wall"), default="recorded")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--quick", action="store_true", help="300 turns, 3 rounds, the first of the pools")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    if options.quick:
        options.turns, options.rounds = min(options.turns, 300), min(options.rounds, 3)
        options.pools = options.pools.split(",")[0]
    rows: list[dict[str, Any]] = []
    others: list[Request] = []
    ratio = 1.0
    if options.order == "circle":
        played = circle(options.sessions, options.rounds, options.tokens)
    elif WEKA.exists():
        recorded = trace(WEKA, options.seed, options.alive, options.sessions)[: options.turns]
        ratio = scale(recorded, options.context)
        played = scaled(recorded, ratio)
        others = trace(WEKA, options.seed, options.alive, skipped=options.sessions)
    else:
        sys.exit(f"no recorded sessions: {WEKA} is absent; they lie beside the repository in ../shared")
    if not options.simulate and not options.model:
        parser.error("which --model? Or --simulate")
    requests = [turn.request for turn in played]
    peak, tokens = peak_blocks(requests), sum(len(turn.prompt) for turn in played)
    print(
        f"{len(played)} turns of {len({r.session for r in requests})} sessions, {tokens} prompt tokens,"
        f" live sessions hold {peak} blocks of {BLOCK_TOKENS} at their peak",
        flush=True,
    )
    for blocks in (int(float(pool) * peak) for pool in options.pools.split(",")):
        policies: dict[str, Policy] = {"LRU": LRU(True), "oracle": Oracle(requests)}
        if options.simulate:
            policies |= {"stops": Learned(blocks), "finals": Learned(blocks, finals=True)}
            if others:
                policies["warm"] = Learned(blocks, finals=True, returns=handed_on(others, ratio))
        shares = {name: simulated(played, blocks, policy) for name, policy in policies.items()}
        print(f"{blocks} blocks, {peak / blocks:.2f} x: simulated {in_percent(shares)}", flush=True)
        for kind in options.kinds.split(",") if not options.simulate else ():
            with TemporaryDirectory() as folder:
                warm = Path(folder) / "learned.jsonl"
                if kind == "warm":
                    learned.Learned(warm, 0.0).close(taught(others, ratio))
                cached, wall_s = play(played, kind, blocks, options, warm)
            print(f"{blocks} blocks: {in_percent({kind: cached / tokens})} in {wall_s:.0f} s", flush=True)
            rows.append({"blocks": blocks, "kind": kind, "share": cached / tokens, **shares, "wall_s": wall_s})
        if options.simulate:
            rows.append({"blocks": blocks, **shares})
    if options.json:
        print(json.dumps({"order": options.order, "peak_blocks": peak, "prompt_tokens": tokens, "rows": rows}))


def in_percent(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {100 * share:.2f} %" for name, share in shares.items())


if __name__ == "__main__":
    main()
