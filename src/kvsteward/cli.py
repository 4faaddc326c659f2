"""The command line: one short function per verb. Logic lives in the rooms."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from kvsteward.errors import KVStewardError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Keeps long LLM-agent sessions inside a fixed KV-cache budget, in front of and inside the engine.",
)


def default_store() -> str:
    """One file in the user's data folder."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return str(Path(base) / "kvsteward" / "sessions.db")


@app.callback()
def _root() -> None:
    """Commands of kvsteward."""


@app.command()
def serve(
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="`embedded` (the default: llama.cpp in a child process), or the engine's URL; what it speaks is found "
            "out. `vllm=URL`, `sglang=URL`, `llama-server=URL` or `openai=URL` says so. Several times for several "
            "engines: each session stays at one, and goes on at another when that is down or drained."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any free one and prints it.")] = 8080,
    model: Annotated[Path | None, typer.Option(help="A GGUF file for the embedded engine. Default: SmolLM2.")] = None,
    ctx: Annotated[
        int | None, typer.Option(help="Embedded: the longest prompt + answer of a session, in tokens.")
    ] = None,
    slots: Annotated[int, typer.Option(help="Embedded: sessions whose KV is resident at the same time.")] = 4,
    threads: Annotated[
        int | None, typer.Option(help="Embedded: threads for prefill and decode. Default: all cores but one.")
    ] = None,
    kv: Annotated[
        str, typer.Option(help="Embedded: KV cache type, `f16`, `q8_0`, `q4_0`, or K and V apart: `q8_0:f16`.")
    ] = "f16",
    upstream_key: Annotated[
        str | None, typer.Option(help="API key that the engine asks for.", envvar="KVSTEWARD_UPSTREAM_KEY")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Session log: a file, `sqlite:///FILE`, `memory:`, or `valkey://HOST:PORT/DB`, which several gateways "
            "may share (`valkeys://` with TLS; USER:PASSWORD@ before the host).",
            envvar="KVSTEWARD_STORE",
        ),
    ] = None,
    budget: Annotated[
        int | None, typer.Option(help="KV budget of one session in tokens. Default: the engine's context.")
    ] = None,
    mode: Annotated[str, typer.Option(help="`managed`, or `passthrough` to leave conversations alone.")] = "managed",
    ttl: Annotated[
        float, typer.Option(help="Idle seconds after which a session gives back its KV (never its log).")
    ] = 1800,
    log_days: Annotated[float, typer.Option(help="Days that an unused log is kept.")] = 30,
    policy: Annotated[
        str | None,
        typer.Option(
            help="What is kept, reduced and moved: `support`, `coding`, `legal`, `device-control`, or a YAML file. "
            "`kvsteward policy show NAME` prints one. The options below say otherwise for single settings."
        ),
    ] = None,
    high_water: Annotated[
        float | None,
        typer.Option(help="Share of the budget at which a session is compacted at the latest. Default: 0.85."),
    ] = None,
    low_water: Annotated[
        float | None, typer.Option(help="Share of the budget that a compaction leaves. Default: 0.4.")
    ] = None,
    memory_price: Annotated[
        float | None,
        typer.Option(
            help="What a token held for a turn is worth in tokens of prefill. Over 0, sessions are compacted earlier; "
            "docs/marks.md has the model. Default: 0."
        ),
    ] = None,
    keep_rounds: Annotated[
        int | None, typer.Option(help="Newest rounds that a compaction keeps verbatim. Default: 3.")
    ] = None,
    tool_limit: Annotated[
        int | None, typer.Option(help="Tokens over which a tool result is reduced on entry. Default: budget / 16.")
    ] = None,
    summary: Annotated[
        str | None,
        typer.Option(help="Who writes the rolling summary: `engine` (in the background, the default) or `extractive`."),
    ] = None,
    selective: Annotated[
        float | None,
        typer.Option(
            help="Of a long prose result, keep at most this share: the sentences that the engine finds least "
            "predictable. Needs vLLM, and a prefill of each such text. Default: off."
        ),
    ] = None,
    recall: Annotated[
        bool, typer.Option("--recall", help="Offer the model a tool that returns what left its view.")
    ] = False,
    embeddings: Annotated[
        str | None,
        typer.Option(
            help="URL of a server with OpenAI's `/v1/embeddings`: recall finds by meaning too, not by words alone. "
            "Needs `kvsteward[embeddings]`. Default: off."
        ),
    ] = None,
    embeddings_model: Annotated[str | None, typer.Option(help="The model that it is asked for.")] = None,
    embeddings_key: Annotated[
        str | None, typer.Option(help="API key that it asks for.", envvar="KVSTEWARD_EMBEDDINGS_KEY")
    ] = None,
    embeddings_dimensions: Annotated[
        int | None, typer.Option(help="Length of its vectors, where the model leaves the choice.")
    ] = None,
    embeddings_query_prefix: Annotated[
        str, typer.Option(help="What the model wants before a question, `search_query: ` for one.")
    ] = "",
    embeddings_text_prefix: Annotated[
        str, typer.Option(help="What it wants before a text, `search_document: ` for one.")
    ] = "",
    hints: Annotated[
        str,
        typer.Option(
            help="Tell kvsteward's connector inside vLLM of sessions: `auto` where its endpoint plug-in answers, `on` "
            "where you know that it is there, `off`."
        ),
    ] = "auto",
    max_body_mib: Annotated[int, typer.Option(help="Largest request body.")] = 64,
    tenants: Annotated[
        Path | None, typer.Option(help="YAML file of tenants with their API keys. Default: no keys.")
    ] = None,
    cache_secret: Annotated[
        str | None,
        typer.Option(
            help="For tenants with `isolate_cache: true`: what their salts are made of, the same at all gateways. "
            "Default: random, so that a restart finds nothing in the engines' caches.",
            envvar="KVSTEWARD_CACHE_SECRET",
        ),
    ] = None,
) -> None:
    """Start the gateway in front of an engine. Point your agent's OpenAI base URL at it; open it in a browser."""
    from kvsteward.gateway.serve import ServeOptions, run

    options = ServeOptions(
        engines=engine or ["embedded"], host=host, port=port, model=model, ctx=ctx, slots=slots, threads=threads, kv=kv,
        upstream_key=upstream_key, store=store or default_store(), budget=budget, mode=mode, ttl_s=ttl,
        log_days=log_days, policy=policy, high_water=high_water,
        low_water=low_water, memory_price=memory_price, keep_rounds=keep_rounds, tool_limit=tool_limit, summary=summary,
        selective=selective, max_body_mib=max_body_mib, recall=recall, tenants=tenants, hints=hints,
        cache_secret=cache_secret,
        embeddings=embeddings, embeddings_model=embeddings_model, embeddings_key=embeddings_key,
        embeddings_dimensions=embeddings_dimensions, embeddings_query_prefix=embeddings_query_prefix,
        embeddings_text_prefix=embeddings_text_prefix,
    )  # fmt: skip
    run(options)


@app.command()
def demo(
    turns: Annotated[int, typer.Option(help="Turns of the session.")] = 120,
    ctx: Annotated[int, typer.Option(help="KV budget of the session in tokens, for both modes.")] = 4_096,
    data: Annotated[Path | None, typer.Option(help="Folder of recorded conversations (*.jsonl) to play.")] = None,
    engine: Annotated[str, typer.Option(help="`embedded`, or the engine's URL.")] = "embedded",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a chart of resident tokens by turn to this file.")] = None,
) -> None:
    """Play one long agent session twice with the same KV budget: passed through, and managed."""
    from kvsteward.lab.demo.run import DemoOptions
    from kvsteward.lab.demo.show import show_demo

    show_demo(DemoOptions(turns, ctx, data, engine), as_json=as_json, html=html)


@app.command()
def ledger(
    model: Annotated[
        str, typer.Argument(help="A `config.json`, a folder with one, a GGUF file, or a Hugging Face id.")
    ],
    context: Annotated[int, typer.Option(help="Tokens of one session.")] = 8_192,
    sessions: Annotated[int, typer.Option(help="Sessions alive at the same time.")] = 1,
    kv: Annotated[
        str, typer.Option(help="KV format: `auto`, `fp16`, `fp8`, `q8_0`, ... or K and V apart: `q8_0:q4_0`.")
    ] = "auto",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    kv_gib: Annotated[float | None, typer.Option(help="Also: what a KV pool of this size on one rank holds.")] = None,
    engine: Annotated[
        str, typer.Option(help="Whose allocation rules: vllm, vllm-cpu, sglang, llamacpp, transformers.")
    ] = "vllm",
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """What the KV cache of a model costs, to the byte, and where each figure comes from."""
    from rich.console import Console

    from kvsteward.lab.account import LedgerQuestion, answer, show

    found = answer(model, LedgerQuestion(context, sessions, kv, tp, pp, kv_gib, engine))
    if json:
        print_json(found.to_dict())
    else:
        show(found, Console())


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="A `config.json`, a folder with one, a GGUF file, or a Hugging Face id.")
    ],
    gpu: Annotated[str | None, typer.Option(help="GPUs, `8xH100`.")] = None,
    gpu_gib: Annotated[str | None, typer.Option(help="Or only their size in GiB: `80`, `8x80`.")] = None,
    context_p50: Annotated[int | None, typer.Option(help="Median prompt of a turn, in tokens.")] = None,
    context_p95: Annotated[int | None, typer.Option(help="95th percentile of it.")] = None,
    output: Annotated[int | None, typer.Option(help="Tokens of an answer. Default: 1,024.")] = None,
    sessions: Annotated[int | None, typer.Option(help="Sessions alive at once. Default: 1, or the trace's.")] = None,
    turn_every: Annotated[float | None, typer.Option(help="Seconds from one turn of a session to its next.")] = None,
    pause: Annotated[
        float | None, typer.Option(help="Or seconds from an answer to the next turn. Default: 10.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Recorded turns: WEKA, Mooncake, Azure, or a store of `kvsteward serve`.")
    ] = None,
    ttft_ms: Annotated[float | None, typer.Option(help="Wished time to the first token.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Wished time per token.")] = None,
    engine: Annotated[str, typer.Option(help="vllm, sglang, llama-server.")] = "vllm",
    kv: Annotated[str, typer.Option(help="KV format: `auto` (quantised if needed), `model` (never), `fp8`.")] = "auto",
    calibrate: Annotated[
        Path | None, typer.Option(help="A start-up log of vLLM: sizes measured, not estimated.")
    ] = None,
    load_as: Annotated[str | None, typer.Option(help="What the engine is to load, if not MODEL.")] = None,
    weights_gib: Annotated[float | None, typer.Option(help="Size of the weights, where no config tells it.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture of the GPUs' memory to this file.")] = None,
) -> None:
    """Settings for a model, GPUs and a workload, each with its reason, and the command that starts the engine."""
    from rich.console import Console

    from kvsteward.lab.planner import PlanQuestion, answer, present

    question = PlanQuestion(
        gpu, gpu_gib, context_p50, context_p95, output, sessions, turn_every, pause, trace, ttft_ms, tpot_ms, engine,
        kv, calibrate, load_as, weights_gib,
    )  # fmt: skip
    found = answer(model, question)
    present(found, None if json else Console(), svg)
    if json:
        print_json(found.to_dict())
    found.check()


@app.command()
def doctor(
    url: Annotated[str | None, typer.Argument(help="An engine's URL, or that of a kvsteward gateway.")] = None,
    window: Annotated[float, typer.Option(help="Seconds to look.")] = 60,
    flags: Annotated[str | None, typer.Option(help="The engine's command line, for what it does not report.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again until interrupted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a window.")] = False,
    metrics: Annotated[
        list[Path] | None,
        typer.Option(help="A saved metrics page in place of a URL; twice for the start and the end of a window."),
    ] = None,
    requests: Annotated[
        Path | None, typer.Option(help="Chat requests, one JSON object a line: finds what breaks their common front.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="The model's config.json, its folder, or a GGUF file.")] = None,
    torch: Annotated[Path | None, typer.Option(help="JSON of torch.cuda.memory_stats() from the engine.")] = None,
    key: Annotated[str | None, typer.Option(help="API key of the engine.", envvar="KVSTEWARD_UPSTREAM_KEY")] = None,
) -> None:
    """Look at a live engine and say what is wrong with its KV cache, why, and which flag to change."""
    from kvsteward.lab.doctor.run import DoctorOptions
    from kvsteward.lab.doctor.show import show_doctor

    options = DoctorOptions(url, window, flags, metrics or (), requests, config, torch, key)
    show_doctor(options, as_json=as_json, watch=watch)


@app.command()
def lint(
    source: Annotated[str, typer.Argument(help="A file of recorded requests, or the URL of a kvsteward gateway.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    limit: Annotated[int, typer.Option(help="Findings that are shown, dearest first.")] = 20,
    key: Annotated[str | None, typer.Option(help="API key of the gateway.", envvar="KVSTEWARD_API_KEY")] = None,
) -> None:
    """Find what breaks the prefix cache: a clock in the system prompt, tools in another order, a rewritten history.

    Compares the requests of each session one after the other. Says the part, the character and the token where they
    first differ, what share of all prompt tokens is computed again for it, and what mends it. Exit status 1 if
    something was found.

    A file has one request a line: a body of OpenAI's chat completions or Anthropic's messages, alone or in a proxy's
    record (`{"headers": ..., "body": ...}`), or a recorded conversation (`{"messages": ...}` with the answers in it).
    """
    from kvsteward.lab.lint.show import show_lint

    raise typer.Exit(show_lint(source, as_json=as_json, key=key, limit=limit))


sessions_app = typer.Typer(no_args_is_help=True, help="Look into a store of session logs; move a session.")
app.add_typer(sessions_app, name="sessions")
Store = Annotated[
    str | None, typer.Option(help="The store that `kvsteward serve` was given.", envvar="KVSTEWARD_STORE")
]


@sessions_app.command("list")
def list_sessions(store: Store = None, limit: int = 50, json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """The sessions of a store, newest use first."""
    from kvsteward.lab.logs import listed, show_sessions

    rows = listed(store or default_store(), limit)
    if json:
        print_json(rows)
    else:
        show_sessions(rows)


@sessions_app.command()
def verify(store: Store = None, session: str | None = None) -> None:
    """Derive every hash of the log again and compare. Exit status 1 if anything is wrong."""
    from kvsteward.lab.logs import faults

    found = faults(store or default_store(), session)
    for fault in found:
        print(f"{fault.session_id} {fault.hash[:12]}: {fault.problem}")
    print(f"{len(found)} faults" if found else "clean")
    raise typer.Exit(1 if found else 0)


Gateway = Annotated[str, typer.Option(help="The gateway's URL.", envvar="KVSTEWARD_GATEWAY")]
Key = Annotated[
    str | None, typer.Option(help="API key of an admin, where the gateway asks for keys.", envvar="KVSTEWARD_API_KEY")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]
HERE = "http://127.0.0.1:8080"


@sessions_app.command("move")
def move_session(
    session: Annotated[str, typer.Argument(help="The session's id.")],
    to: Annotated[str, typer.Option(help="The engine that it goes on at, by its URL.")],
    wait: Annotated[float, typer.Option(help="Seconds to wait for a turn that is running. 0: refuse.")] = 0,
    tenant: Annotated[str | None, typer.Option(help="Whose session it is, if not the key's own.")] = None,
    gateway: Gateway = HERE,
    key: Key = None,
    json: Json = False,
) -> None:
    """Let a session go on at another engine from its next turn on; with a shared KV store its cache goes with it."""
    from kvsteward.lab import operate

    moved = operate.move(operate.Gateway(gateway, key), session, to, wait, tenant)
    if json:
        print_json(moved)
    else:
        print(f"{moved['id']} {'goes on' if moved['moved'] else 'is already'} at {moved['to']}")


engines_app = typer.Typer(no_args_is_help=True, help="See and steer the engines of a running gateway.")
app.add_typer(engines_app, name="engines")


@engines_app.command("list")
def list_engines(gateway: Gateway = HERE, key: Key = None, json: Json = False) -> None:
    """The engines: state, turns on the way, sessions bound to them, tokens resident and free."""
    from kvsteward.lab import operate

    rows = operate.engines(operate.Gateway(gateway, key))
    if json:
        print_json(rows)
    else:
        operate.show_engines(rows)


Drained = Annotated[str, typer.Argument(help="The engine, by its URL.")]


@engines_app.command("drain")
def drain_engine(engine: Drained, gateway: Gateway = HERE, key: Key = None, json: Json = False) -> None:
    """No new turns for an engine: running ones end, its sessions go on elsewhere. Ends with `undrain` or a restart of
    the gateway."""
    _drain(engine, gateway, key, json, on=True)


@engines_app.command("undrain")
def undrain_engine(engine: Drained, gateway: Gateway = HERE, key: Key = None, json: Json = False) -> None:
    """Turns again for an engine."""
    _drain(engine, gateway, key, json, on=False)


def _drain(engine: str, gateway: str, key: str | None, json: bool, *, on: bool) -> None:
    from kvsteward.lab import operate

    state = operate.drain(operate.Gateway(gateway, key), engine, on=on)
    if json:
        print_json(state)
    else:
        print(f"{state['engine']} is {state['state']}, {state['turns']} turns are on the way")


policy_app = typer.Typer(no_args_is_help=True, help="What a session's context is kept by: presets and YAML files.")
app.add_typer(policy_app, name="policy")


@policy_app.command("list")
def list_policies() -> None:
    """The presets, and what each is for."""
    from kvsteward.context.policies import load_policy, presets

    for name in presets():
        print(f"{name:16}{load_policy(name).about}")


@policy_app.command("show")
def show_policy(
    name: Annotated[str, typer.Argument(help="A preset, or a YAML file.")],
) -> None:
    """Print a policy with all its values, as a file that `--policy` takes. Faults are told by their field."""
    from kvsteward.context.policies import dump_policy, load_policy

    print(dump_policy(load_policy(name)), end="")


def print_json(payload: object) -> None:
    import orjson

    print(orjson.dumps(payload).decode())


def main() -> None:
    """Runs the command line. An error of ours is one line and a hint, never a traceback."""
    try:
        app()
    except KVStewardError as error:
        fail(error)


def fail(error: KVStewardError) -> NoReturn:
    print(f"kvsteward: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"  hint: {error.hint}", file=sys.stderr)
    raise SystemExit(1)
