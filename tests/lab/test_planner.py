"""`kvsteward plan`: commands that the engines' parsers take, figures that the ledger gives, errors that say what to do."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from kvsteward.cli import app
from kvsteward.errors import ConfigError, KVStewardError
from kvsteward.lab.planner import PlanQuestion, answer, draw, show
from kvsteward.lab.planner.drawing import COLOURS
from kvsteward.lab.planner.hardware import named, sized
from kvsteward.lab.planner.memory import GIB, Gpu, Part
from kvsteward.lab.planner.question import demand
from kvsteward.lab.planner.show import bar
from kvsteward.lab.planner.traces import read_trace
from kvsteward.ledger import ModelSpec, account, devices
from kvsteward.sessions import Entry, Session, open_store
from kvsteward.wire.fingerprint import root

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / ".." / "shared" / "data"
VLLM_PYTHON = Path(os.environ.get("KVSTEWARD_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
# Qwen2.5-72B-Instruct's config.json, the fields that count (Qwen, Hugging Face)
QWEN_72B = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "hidden_size": 8192, "intermediate_size": 29568, "vocab_size": 152064,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
ASKED = PlanQuestion(gpu="8xH100", context_p95_tokens=24_000, sessions=64, load_as="Qwen/Qwen2.5-72B-Instruct")


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_72B))
    return str(tmp_path)


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for words in json.load(sys.stdin):
    got = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    print(json.dumps([got.max_model_len, got.max_num_seqs, got.max_num_batched_tokens, got.gpu_memory_utilization,
                      got.tensor_parallel_size, str(got.kv_cache_dtype), got.enable_prefix_caching, got.port]))
"""


@pytest.mark.vllm
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="no vLLM environment: make setup-vllm")
@pytest.mark.timeout(300)
def test_vllm_takes_every_flag(qwen: str) -> None:
    plans = [answer(qwen, ASKED), answer(qwen, replace(ASKED, kv="model", tpot_ms=25, sessions=20))]
    lines = [shlex.split(line) for found in plans for line in found.commands]
    sent = json.dumps([line[line.index("serve") + 1 :] for line in lines])
    ran = subprocess.run(
        [str(VLLM_PYTHON), "-c", PARSE], input=sent, capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2_000:]
    got = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    settings_ = [found.settings for found in plans for _ in found.commands]
    assert len(got) == len(settings_) >= 3
    for row, want in zip(got, settings_, strict=True):
        assert row[:5] == [
            want.max_model_len,
            want.max_num_seqs,
            want.max_num_batched_tokens,
            want.utilization,
            want.tp,
        ]
        assert row[5:7] == [want.kv_dtype, want.prefix_caching]


@pytest.mark.embedded
@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no embedded engine: make setup")
def test_llama_cpp_knows_every_flag(qwen: str) -> None:
    """llama.cpp's own argument table is compiled into the wheel; its names are there as whole strings."""
    found = answer(qwen, replace(ASKED, engine="llama-server", load_as="m.gguf"))
    spec = find_spec("xllamacpp")
    assert spec is not None and spec.origin is not None
    library = next(Path(spec.origin).parent.glob("xllamacpp*.so")).read_bytes()
    flags = [word for word in shlex.split(found.commands[0]) if word.startswith("-")]
    assert {"-c", "-np", "-ctk", "-ctv", "-fa"} <= set(flags)
    assert [flag for flag in flags if b"\0" + flag.encode() + b"\0" not in library] == []


def test_the_ledger_gives_the_same_figures(qwen: str) -> None:
    found = answer(qwen, ASKED)
    plan, spec = found.plan, ModelSpec.from_hf_config(QWEN_72B)
    tokens, tp = found.demand.workload.typical_tokens, found.settings.tp
    blocks = -(-tokens // 16) * 16
    session = account(spec, blocks, kv_dtype="fp8", tp=tp).total_bytes
    assert session == blocks * 80 * 2 * (8 // tp) * 128  # layers x (K, V) x heads of a rank x head_dim, a byte each
    figures = {figure.name: figure.value for figure in plan.figures}
    assert figures["KV a session"] == session
    assert figures["weights a rank"] == -(-spec.weight_bytes() // tp)
    assert plan.sessions.low == plan.replicas * (plan.pool.low // session) >= 64
    low = int(0.95 * 79.2 * GIB) - figures["weights a rank"] - plan.deployment.overhead.total.high
    assert plan.pool.low == low
    assert found.settings.max_model_len == 26_112  # 24,000 x 99 / 95 + 1,024, up to 256
    assert found.settings.kv_dtype == "fp8"


def test_each_replica_has_its_own_gpus_and_port(qwen: str) -> None:
    first, second = (shlex.split(line) for line in answer(qwen, ASKED).commands)
    assert (first[0], second[0]) == ("CUDA_VISIBLE_DEVICES=0,1,2,3", "CUDA_VISIBLE_DEVICES=4,5,6,7")
    assert (value(first, "--port"), value(second, "--port")) == ("8000", "8001")
    assert first[1:4] == ["vllm", "serve", "Qwen/Qwen2.5-72B-Instruct"]


def test_slots_of_llama_server_hold_all_sessions(qwen: str) -> None:
    words = shlex.split(answer(qwen, replace(ASKED, engine="llama-server", load_as="m.gguf")).commands[0])
    assert int(value(words, "-np")) == 64
    assert int(value(words, "-c")) == 64 * 26_112


def test_the_parts_of_each_gpu_add_up(qwen: str) -> None:
    for gpu in answer(qwen, ASKED).gpus:
        assert sum(part.size_bytes for part in gpu.parts) == int(79.2 * GIB)
        assert all(part.low_bytes <= part.size_bytes <= part.high_bytes for part in gpu.parts)


def test_what_a_person_sees(qwen: str) -> None:
    found, out = answer(qwen, replace(ASKED, ttft_ms=500, tpot_ms=40)), StringIO()
    show(found, Console(file=out, width=160))
    text = out.getvalue()
    assert "GPU 7: replica 1, rank 3" in text
    for name in ("max_model_len", "P/D", "prefix caching", "shorten the context", "TTFT", "TPOT"):
        assert name in text
    assert set(found.commands) <= set(text.splitlines())  # unbroken


@pytest.mark.parametrize("count", [1, 8, 40])
def test_the_svg_is_xml_and_its_labels_fit(count: int) -> None:
    parts = tuple(Part(name, (index + 1) * GIB, GIB, 20 * GIB) for index, name in enumerate(COLOURS))
    text = draw('a <model> & "more" ' * 20, tuple(Gpu(index, "replica 0, rank 0", parts) for index in range(count)))
    page = ET.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    width, height = float(page.attrib["width"]), float(page.attrib["height"])
    words = [item for item in page.iter(f"{space}text") if item.get("text-anchor") != "middle"]
    assert all(float(item.attrib["x"]) + 6.2 * len(item.text or "") <= width for item in words)
    assert all(float(item.attrib["y"]) < height for item in words)
    assert "prefers-color-scheme:dark" in text


@given(st.lists(st.integers(0, 10**12), min_size=6, max_size=6), st.integers(20, 100))
@settings(deadline=None)
def test_bars_fill_their_width(sizes: list[int], width: int) -> None:
    parts = tuple(Part(name, size, size, size) for name, size in zip(COLOURS, sizes, strict=True))
    assert len(bar(parts, width).plain) == (width if sum(sizes) else min(width, len(parts)))


def test_a_wish_for_speed_lowers_the_scheduler_only(qwen: str) -> None:
    free, wished = answer(qwen, ASKED), answer(qwen, replace(ASKED, tpot_ms=20))
    assert wished.settings.max_num_seqs < free.settings.max_num_seqs
    assert wished.settings.max_num_batched_tokens < free.settings.max_num_batched_tokens
    assert wished.targets[0].met
    assert not answer(qwen, replace(ASKED, tpot_ms=1)).targets[0].met


def test_a_log_of_another_split_is_scaled(qwen: str, tmp_path: Path) -> None:
    log = tmp_path / "start.log"
    log.write_text("tensor_parallel_size=8, ...\nModel loading took 17.0 GiB and 9 seconds\n")
    found = answer(qwen, replace(ASKED, calibrate=log))
    assert found.plan.deployment.rank_weight_bytes == pytest.approx(8 * 17.0 * GIB / found.settings.tp, abs=8)


def test_weights_that_no_config_tells(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_72B | {"model_type": "stranger"}))
    with pytest.raises(ConfigError) as caught:
        answer(str(tmp_path), ASKED)
    assert "--weights-gib" in caught.value.hint
    given = answer(str(tmp_path), replace(ASKED, weights_gib=100))
    assert given.plan.deployment.weight_bytes == 100 * GIB
    (tmp_path / "model.safetensors").write_bytes(bytes(4_096))
    assert answer(str(tmp_path), ASKED).plan.deployment.weight_bytes == 4_096


# hardware


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("8xH100", "H100 SXM", 8),
        ("H200", "H200 SXM", 1),
        ("2 x RTX 4090", "RTX 4090", 2),
        ("4xA100-80GB", "A100 SXM 80GB", 4),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB", 1),
        ("1xa10", "A10", 1),
        ("8xMI300X", "MI300X", 8),
    ],
)
def test_gpus_as_people_write_them(text: str, name: str, count: int) -> None:
    found = named(text)
    assert (found.device.name, found.count) == (name, count)


@pytest.mark.parametrize(
    ("text", "near"), [("8xH1000", "H100 SXM"), ("A1000", "A100"), ("A100", "A100 SXM 40GB"), ("RTX 4080", "RTX 4090")]
)
def test_an_unknown_gpu_names_near_ones(text: str, near: str) -> None:
    with pytest.raises(ConfigError, match="called") as caught:
        named(text)
    assert near in caught.value.hint


def test_every_device_is_found_by_its_own_name() -> None:
    assert all(named(f"3x{device.name}").device == device for device in devices())


def test_a_gpu_of_a_size() -> None:
    found = sized("8x80")
    assert (found.count, found.device.memory_gib) == (8, 80)
    assert "H100 SXM" in found.note
    for bad in ("0", "8x", "nan", "many", "-1x80"):
        with pytest.raises(ConfigError):
            sized(bad)


# bad questions


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"sessions": -3}, "--sessions"),
        ({"context_p95_tokens": -1}, "--context-p95"),
        ({"pause_s": float("nan")}, "--pause"),
        ({"tpot_ms": 0.0}, "--tpot-ms"),
    ],
)
def test_numbers_that_cannot_be(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlanQuestion(**bad)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gpu": None}, "--gpu"),
        ({"gpu_gib": "80"}, "one of the two"),
        ({"engine": "tgi"}, "engine"),
        ({"kv": "q4_0"}, "--kv"),
        ({"context_p95_tokens": None}, "how long"),
        ({"context_p50_tokens": 30_000}, "below"),
        ({"trace": Path("nowhere")}, "not both"),
        ({"calibrate": Path("nowhere")}, "no log"),
    ],
)
def test_questions_that_cannot_be_answered(qwen: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        answer(qwen, replace(ASKED, **changed))


def test_what_does_not_fit_says_how_many_would(qwen: str) -> None:
    found = answer(qwen, replace(ASKED, sessions=1_000))
    with pytest.raises(ConfigError, match="do not fit 8 x H100 SXM") as caught:
        found.check()
    need = found.devices_needed
    assert need is not None
    assert f"{need} x H100 SXM" in caught.value.hint
    assert answer(qwen, replace(ASKED, sessions=1_000, gpu=f"{need}xH100")).plan.enough
    assert not answer(qwen, replace(ASKED, sessions=1_000, gpu=f"{need - 1}xH100")).plan.enough


def test_a_model_that_does_not_fit_says_how_many_would(qwen: str) -> None:
    with pytest.raises(ConfigError, match="too small") as caught:
        answer(qwen, replace(ASKED, gpu="1xH100"))
    assert "starts on 4 x H100 SXM" in caught.value.hint


def test_the_command_line(qwen: str, tmp_path: Path) -> None:
    picture = tmp_path / "memory.svg"
    flags = ["--gpu", "8xH100", "--context-p95", "24000", "--json", "--svg", str(picture)]
    good = CliRunner().invoke(app, ["plan", qwen, *flags, "--sessions", "64"])
    told = json.loads(good.stdout)
    assert good.exit_code == 0
    assert told["enough"] and told["command"] == told["commands"][0]
    ET.parse(picture)
    bad = CliRunner().invoke(app, ["plan", qwen, *flags, "--sessions", "5000"])
    assert json.loads(bad.stdout)["devices_needed"] > 8
    assert isinstance(bad.exception, ConfigError)


# traces


def compact(**changes: Any) -> dict[str, Any]:
    columns = ["t", "in", "out", "think_time", "shared_prefix_blocks"]
    rows: list[Any] = [[0, 100, 5, 0.0, 0], [9, 300, 7, 4.0, 1], {"sub": [[0, 50, 2, 0.0, 0]], "t": 9}]
    return {"id": "a", "block_size": 64, "cols": columns, "requests": rows} | changes


def test_weka_compact(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(compact()).encode()))
    trace = read_trace(path)
    assert [(t.input_tokens, t.output_tokens, t.cached_tokens, t.pause_s) for t in trace.turns] == [
        (100, 5, 0, 4.0),
        (300, 7, 64, 0.0),
        (50, 2, 0, 0.0),
    ]
    assert trace.sessions == 1  # the sub-agent is inside
    found = demand(PlanQuestion(gpu="H100", trace=path))
    assert found.workload.pause_s == 4.0
    assert any("alive at once" in note for note in found.notes)


def test_weka_original(tmp_path: Path) -> None:
    rows = [
        {"in": 128, "out": 5, "think_time": 0.0, "hash_ids": [1, 2]},
        {"in": 200, "out": 5, "think_time": 3.0, "hash_ids": [1, 2, 3, 4]},
    ]
    (tmp_path / "s.json").write_text(json.dumps({"id": "s", "block_size": 64, "requests": rows}))
    first, second = read_trace(tmp_path).turns
    assert (first.cached_tokens, second.cached_tokens, first.pause_s) == (0, 128, 3.0)


def test_mooncake_and_azure_need_the_sessions(tmp_path: Path) -> None:
    moon, azure = tmp_path / "m.jsonl", tmp_path / "a.csv"
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
    moon.write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,4808,10\n")
    assert [turn.cached_tokens for turn in read_trace(moon).turns] == [0, 600]
    assert read_trace(azure).turns[0].input_tokens == 4808
    for path in (moon, azure):
        with pytest.raises(ConfigError, match="tell sessions apart"):
            demand(PlanQuestion(gpu="H100", trace=path))
        assert demand(PlanQuestion(gpu="H100", trace=path, sessions=3)).workload.sessions == 3


def test_our_own_log(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = open_store(str(path))
    session = Session("s", "t", "idle", "", 0.0, 0.0, 60.0)
    store.create(session)
    entries, parent = [], root("t")
    for depth, (source, tokens, at) in enumerate(
        [("client", 100, 0.0), ("engine", 20, 2.0), ("client", 30, 9.0), ("engine", 10, 9.5)]
    ):
        entries.append(Entry(f"{depth:064x}", parent, depth + 1, source, b"{}", at, tokens))  # type: ignore[arg-type]
        parent = entries[-1].hash
    store.append(replace(session, head=parent, turns=2), entries)
    store.close()
    turns = read_trace(path).turns
    assert [(t.input_tokens, t.output_tokens, t.cached_tokens, t.pause_s) for t in turns] == [
        (100, 20, 0, 7.0),
        (150, 10, 120, 0.0),
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "x,y\n1,2\n"),
        ("b.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,-5,1\n"),
        ("c.jsonl", '{"prompt": "hi"}\n'),
        ("d.jsonl", "no json\n"),
        ("e.jsonl", ""),
        ("f.json", '{"requests": 3}'),
        ("g.jsonl", json.dumps(compact(cols=["t"]))),
        ("h.jsonl.gz", "not gzip"),
        ("i.jsonl", '{"input_length": "many", "output_length": 1, "hash_ids": []}\n'),
        ("j.db", "SQLite format 3\0 and then nothing"),
        ("k.json", json.dumps(compact(requests=[]))),
    ],
)
def test_traces_of_another_shape(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(KVStewardError) as caught:
        read_trace(path)
    assert caught.value.message


@pytest.mark.shared_data
@pytest.mark.skipif(not DATA.exists(), reason="no recorded data beside the repository")
def test_recorded_traces() -> None:
    """471 sessions, 31,932 requests of their own and 425 of 42 sub-agents; the files' rows of the other two."""
    weka = read_trace(DATA / "traces" / "weka" / "weka_compact.jsonl.gz")
    assert (weka.sessions, len(weka.turns)) == (471, 31_932 + 425)
    assert len(read_trace(DATA / "traces" / "azure" / "AzureLLMInferenceTrace_code.csv").turns) == 8_819
    assert len(read_trace(DATA / "traces" / "mooncake" / "conversation_trace.head.jsonl").turns) == 5_553
    raw = read_trace(DATA / "traces" / "weka" / "raw")
    assert raw.sessions == 8
