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
        str,
        typer.Option(
            help="`embedded` (llama.cpp in a child process), or the engine's URL; what it speaks is found out. "
            "`vllm=URL`, `sglang=URL`, `llama-server=URL` or `openai=URL` says so."
        ),
    ] = "embedded",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any free one and prints it.")] = 8080,
    model: Annotated[Path | None, typer.Option(help="A GGUF file for the embedded engine. Default: SmolLM2.")] = None,
    ctx: Annotated[
        int | None, typer.Option(help="Embedded: the longest prompt + answer of a session, in tokens.")
    ] = None,
    slots: Annotated[int, typer.Option(help="Embedded: sessions whose KV is resident at the same time.")] = 4,
    kv: Annotated[
        str, typer.Option(help="Embedded: KV cache type, `f16`, `q8_0`, `q4_0`, or K and V apart: `q8_0:f16`.")
    ] = "f16",
    upstream_key: Annotated[
        str | None, typer.Option(help="API key that the engine asks for.", envvar="KVSTEWARD_UPSTREAM_KEY")
    ] = None,
    store: Annotated[str | None, typer.Option(help="Session log: a file, `sqlite:///FILE` or `memory:`.")] = None,
    budget: Annotated[
        int | None, typer.Option(help="KV budget of one session in tokens. Default: the engine's context.")
    ] = None,
    mode: Annotated[str, typer.Option(help="`managed`, or `passthrough` to leave conversations alone.")] = "managed",
    ttl: Annotated[
        float, typer.Option(help="Idle seconds after which a session gives back its KV (never its log).")
    ] = 1800,
    log_days: Annotated[float, typer.Option(help="Days that an unused log is kept.")] = 30,
    high_water: Annotated[float, typer.Option(help="Share of the budget at which a session is compacted.")] = 0.85,
    low_water: Annotated[float, typer.Option(help="Share of the budget that a compaction leaves.")] = 0.40,
    keep_rounds: Annotated[int, typer.Option(help="Newest rounds that a compaction keeps verbatim.")] = 3,
    tool_limit: Annotated[
        int | None, typer.Option(help="Tokens over which a tool result is reduced on entry. Default: budget / 16.")
    ] = None,
    summary: Annotated[str, typer.Option(help="Who writes the rolling summary: `engine` or `extractive`.")] = "engine",
    max_body_mib: Annotated[int, typer.Option(help="Largest request body.")] = 64,
    tenants: Annotated[
        Path | None, typer.Option(help="YAML file of tenants with their API keys. Default: no keys.")
    ] = None,
) -> None:
    """Start the gateway in front of an engine. Point your agent's OpenAI base URL at it; open it in a browser."""
    from kvsteward.gateway.serve import ServeOptions, run

    options = ServeOptions(
        engine=engine, host=host, port=port, model=model, ctx=ctx, slots=slots, kv=kv, upstream_key=upstream_key,
        store=store or default_store(), budget=budget, mode=mode, ttl_s=ttl, log_days=log_days, high_water=high_water,
        low_water=low_water, keep_rounds=keep_rounds, tool_limit=tool_limit, summary=summary,
        max_body_mib=max_body_mib, tenants=tenants,
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
