"""The doctor over sockets: real-shaped engines, servers that are none, and what the command prints."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import orjson
import pytest
import uvicorn
from rich.console import Console
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

sys.path.insert(0, str(Path(__file__).parent))
from pages import Vllm

from kvsteward.engines.base import EngineRequest
from kvsteward.engines.scripted import ScriptedEngine, ScriptedOptions
from kvsteward.engines.scripted_server import running_scripted
from kvsteward.errors import ConfigError, EngineError, EngineUnavailableError, KVStewardError
from kvsteward.lab.doctor.clients import count_clients
from kvsteward.lab.doctor.report import Report
from kvsteward.lab.doctor.run import DoctorOptions, Given, examine, read_given
from kvsteward.lab.doctor.show import rendered

DATA = Path(__file__).parent / "data"


async def doctor(url: str, window_s: float = 1.0, **options: object) -> Report:
    asked = DoctorOptions(url, window_s, **options)  # type: ignore[arg-type]
    return await examine(asked, read_given(asked))


def names(report: Report) -> set[str]:
    return {finding["check"] for finding in report.as_json()["findings"]}


def request(session: str, text: str, **fields: object) -> EngineRequest:
    body = {"messages": [{"role": "user", "content": text}], "stream": True, **fields}
    return EngineRequest("/v1/chat/completions", orjson.dumps(body), session, session)


async def turn(engine: ScriptedEngine, session: str, text: str, **fields: object) -> None:
    async with engine.open(request(session, text, **fields)) as reply:
        async for _ in reply.chunks():
            pass


@pytest.mark.parametrize("imitates", ["vllm", "sglang", "llama-server"])
async def test_an_idle_engine_is_healthy(imitates: str) -> None:
    async with running_scripted(ScriptedEngine(ScriptedOptions(imitates=imitates))) as url:  # type: ignore[arg-type]
        seconds: list[float] = []
        asked = DoctorOptions(url, 1.0)
        report = await examine(asked, read_given(asked), seconds.append)
        assert report.verdict.word == "healthy"
        assert names(report) == set()
        assert report.observation.setup.dialect == imitates
        assert seconds == sorted(seconds) and seconds


async def test_a_queue_with_room_in_the_pool() -> None:
    """The clients are real connections of another process, so that they can be counted."""
    options = ScriptedOptions(imitates="vllm", max_running=1, decode_tokens_per_s=20)
    engine = ScriptedEngine(options, answers=lambda _: "word " * 400)
    async with running_scripted(engine) as url, aiohttp.ClientSession() as clients:
        body = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 400}
        replies = [asyncio.create_task(clients.post(f"{url}/v1/chat/completions", json=body)) for _ in range(4)]
        report = orjson.loads((await asyncio.to_thread(run_doctor, url, "--window", "1.5", "--json")).stdout)
        for waiting in replies:
            if waiting.done():
                waiting.result().close()
            waiting.cancel()
        await asyncio.gather(*replies, return_exceptions=True)
    assert [finding["check"] for finding in report["findings"]] == ["queue-low-use"]
    assert report["verdict"] == "tune"
    assert report["findings"][0]["do"][0] == "--max-num-seqs 4"


async def test_a_pool_that_preempts() -> None:
    options = ScriptedOptions(
        imitates="vllm", kv_capacity_tokens=512, context_limit_tokens=512, max_running=8, decode_tokens_per_s=400
    )
    engine = ScriptedEngine(options, answers=lambda _: "word " * 150)
    async with running_scripted(engine) as url:
        looking = asyncio.create_task(doctor(url, 2.0))
        await asyncio.sleep(0.3)
        await asyncio.gather(*(turn(engine, f"s{i}", f"text {i} " * 40, max_tokens=150) for i in range(8)))
        report = await looking
    assert "preemption" in names(report)
    assert report.verdict.is_kv.startswith("yes")


async def test_an_engine_that_goes_away_inside_the_window() -> None:
    async def leave(engine: ScriptedEngine) -> Report:
        async with running_scripted(engine) as url:
            looking = asyncio.create_task(doctor(url, 3.0))
            await asyncio.sleep(1.3)
        return await looking

    report = await leave(ScriptedEngine(ScriptedOptions(imitates="vllm")))
    assert any("scrapes failed" in note for note in report.notes)


@asynccontextmanager
async def served(*routes: Route) -> AsyncIterator[str]:
    """Any server, for what is no engine."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=list(routes)), log_level="critical", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listener.close()


def saying(path: str, value: object) -> Route:
    answer = PlainTextResponse(value) if isinstance(value, str) else JSONResponse(value)
    return Route(path, lambda _: answer)


VERSION = saying("/version", {"version": "0.32.0"})
NO_ENGINE = {
    "no endpoint": ([], "no engine"),
    "openai only": ([saying("/v1/models", {"data": []})], "no engine whose metrics are known"),
    "no metrics": ([VERSION], "does not export metrics"),
    "a web page": ([VERSION, saying("/metrics", "<html><body>hello</body></html>")], "Prometheus|cannot be read"),
    "others' metrics": ([VERSION, saying("/metrics", "go_goroutines 8\n")], "not those of vllm"),
    "nan": (
        [VERSION, saying("/metrics", "vllm:num_requests_running NaN\nvllm:kv_cache_usage_perc NaN\n")],
        "not numbers",
    ),
    "no key": ([Route("/v1/internal/memory", lambda _: PlainTextResponse("", 401))], "API key"),
}


@pytest.mark.parametrize("name", NO_ENGINE)
async def test_what_is_no_engine_is_told_in_one_sentence(name: str) -> None:
    routes, words = NO_ENGINE[name]
    async with served(*routes) as url:
        with pytest.raises(EngineError, match=words) as caught:
            await doctor(url)
    assert caught.value.hint


async def test_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(EngineUnavailableError, match="cannot be reached"):
        await doctor(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("url", ["ftp://x", "http://", "::::"])
async def test_no_url(url: str) -> None:
    with pytest.raises(KVStewardError):
        await doctor(url)


async def test_some_figures_that_are_no_numbers_are_left_out_and_said() -> None:
    page = Vllm(usage="NaN").text()
    async with served(VERSION, saying("/metrics", page), saying("/v1/models", {"data": []})) as url:
        report = await doctor(url)
    assert report.verdict.word == "healthy"
    assert any("kv_cache_usage_perc" in note for note in report.notes)
    assert "not a number" in report.as_json()["unknown"]["saturated"]


async def test_a_gateway_is_seen_through() -> None:
    memory = {
        "engine": {"running": 3, "waiting": 0, "kv_usage_ratio": 0.1, "preemptions_total": 0},
        "sessions": [{"tokens_resident": 9_000}, {"tokens_resident": 6_800}],
        "num_blocks_total": 1000,
        "kv_capacity_tokens": 16_000,
        "block_size": 16,
        "k_dtype": "f16",
        "running": 1,
        "waiting": 0,
    }
    health = {"engine": {"dialect": "vllm", "version": "0.32.0"}}
    metrics = "kvsteward:resident_tokens 15800.0\nkvsteward:turns_total 4\nkvsteward:output_tokens_total 40\n"
    routes = saying("/v1/internal/memory", memory), saying("/health", health), saying("/metrics", metrics)
    async with served(*routes) as url:
        report = await doctor(url, 1.6)
    # Three at work, one of them the gateway's: two run without a client. And the pool is full of idle sessions.
    assert names(report) == {"abandoned", "idle-prefixes"}
    assert report.as_json()["sessions"]["tokens_longest"] == 9_000
    assert report.observation.setup.dialect == "vllm"


def test_own_connections_are_not_clients() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert count_clients(port) is None, "no connection of ours is there to prove that the table shows this port"
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = listener.accept()
            assert count_clients(port) == 0
            script = f"import socket,sys; s=socket.create_connection(('127.0.0.1',{port})); sys.stdin.read()"
            with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as other:
                theirs, _ = listener.accept()
                assert count_clients(port) == 1
                other.communicate()
            theirs.close()
            accepted.close()


# -- files and the command ----------------------------------------------------------------------------------------


def run_doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvsteward", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def saved(tmp_path: Path, *pages: Vllm) -> list[str]:
    arguments = []
    for index, page in enumerate(pages):
        file = tmp_path / f"{index}.prom"
        file.write_text(page.text())
        arguments += ["--metrics", str(file)]
    return arguments


def test_the_command_on_two_saved_pages(tmp_path: Path) -> None:
    files = saved(tmp_path, Vllm(running=9, usage=0.97), Vllm(running=9, usage=0.99, waiting=4, preempted=12))
    done = run_doctor(*files, "--window", "30", "--json")
    assert done.returncode == 0, done.stderr
    report = orjson.loads(done.stdout)
    assert report["verdict"] == "tune"
    assert report["window_s"] == 30
    first = report["findings"][0]
    assert (first["check"], first["severity"], first["do"][0]) == ("preemption", "critical", "--max-num-seqs 4")
    assert set(first) >= {"evidence", "cost", "gain", "source", "signal", "threshold"}
    assert "kv-format" in {finding["check"] for finding in report["findings"]}


def test_the_report_that_a_person_reads(tmp_path: Path) -> None:
    files = saved(tmp_path, Vllm(running=9, usage=0.97), Vllm(running=9, usage=0.99, waiting=4, preempted=12))
    text = run_doctor(*files).stdout
    assert text.index("TUNE") < text.index("CRITICAL") < text.index("WARNING") < text.index("Figures of the window")
    assert "--max-num-seqs 4" in text and "docs.vllm.ai" in text and "12 preemptions" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name an engine's URL"),
        (["http://127.0.0.1:1", "--metrics", "x"], "name an engine's URL"),
        (["--metrics", "/no/such/file"], "cannot be read"),
        (["http://127.0.0.1:1", "--window", "0"], "window"),
        (["http://127.0.0.1:1", "--flags", "'"], "flags"),
        (["http://127.0.0.1:1"], "cannot be reached"),
    ],
)
def test_errors_are_one_line_and_a_hint(arguments: list[str], words: str) -> None:
    done = run_doctor(*arguments)
    assert done.returncode == 1
    assert words in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_watch_looks_again_until_it_is_interrupted(tmp_path: Path) -> None:
    async def twice() -> list[bytes]:
        async with running_scripted(ScriptedEngine(ScriptedOptions(imitates="vllm"))) as url:
            command = [sys.executable, "-m", "kvsteward", "doctor", url, "--window", "0.5", "--watch", "--json"]
            child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            assert child.stdout is not None
            lines = [await child.stdout.readline() for _ in range(2)]
            child.send_signal(2)
            assert await child.wait() == 0
            return lines

    assert [orjson.loads(line)["verdict"] for line in asyncio.run(twice())] == ["healthy"] * 2


SGLANG = {
    "retracting": ({"preemption", "kv-format", "saturated"}, "tune"),
    "shy": ({"queue-low-use"}, "tune"),
    "turning_over": ({"prefix-thrash", "idle-prefixes"}, "tune"),
    "healthy": (set(), "healthy"),
}


@pytest.mark.parametrize("state", SGLANG)
async def test_recorded_sglang(state: str) -> None:
    files = [DATA / f"sglang_{state}_{part}.prom" for part in ("start", "end")]
    flags = "--kv-cache-dtype auto"
    report = await examine(DoctorOptions(None, 60, metrics=files), Given(flags))
    found, verdict = SGLANG[state]
    assert names(report) == found
    assert report.verdict.word == verdict


def test_every_report_can_be_drawn(tmp_path: Path) -> None:
    console = Console(width=100, record=True, file=(tmp_path / "out").open("w"))
    for state in SGLANG:
        files = [DATA / f"sglang_{state}_{part}.prom" for part in ("start", "end")]
        report = asyncio.run(examine(DoctorOptions(None, 60, metrics=files), Given()))
        console.print(rendered(report))
    console.file.close()
    assert "--schedule-conservativeness 0.3" in console.export_text()


def test_a_file_of_another_service(tmp_path: Path) -> None:
    file = tmp_path / "go.prom"
    file.write_text("go_goroutines 8\n")
    with pytest.raises(ConfigError, match="no metrics of vLLM"):
        asyncio.run(examine(DoctorOptions(None, 60, metrics=[file]), Given()))
