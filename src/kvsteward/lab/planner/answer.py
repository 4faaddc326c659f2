"""The answer to a plan question: the plan, its settings after the latency wishes, pictures, commands.

Knows files and the ledger's planner; the arithmetic is the ledger's. Invariant: the commands carry the settings that
the reasons name, one command a replica.
"""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvsteward.errors import ConfigError
from kvsteward.lab.account import load_spec
from kvsteward.lab.planner.hardware import MOST_GPUS, Hardware, named, sized
from kvsteward.lab.planner.memory import Gpu, layout
from kvsteward.lab.planner.question import Demand, PlanQuestion, demand
from kvsteward.lab.planner.reasons import Reason, reasons
from kvsteward.lab.planner.targets import Target, aim
from kvsteward.ledger import ModelSpec
from kvsteward.ledger.plan import Calibration, Plan, Workload, calibrate, make_plan
from kvsteward.ledger.plan.commands import Settings, command

ENGINES = {"vllm": "vllm", "sglang": "sglang", "llama-server": "llamacpp", "llamacpp": "llamacpp"}
_OWN_KV = frozenset({"model", "f16", "fp16", "bf16"})
_LLAMA_KV = frozenset({"q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"})
MOST_WEIGHT_FILES = 10_000
_LARGEST_LOG = 4 * 2**20
_LOG_RANKS = re.compile(r"tensor_parallel_size['\"]?[=:]\s*(\d+)")


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """A plan and all that is shown of it. `devices_needed` is None when the plan is enough or nothing ever would be."""

    name: str
    hardware: Hardware
    demand: Demand
    plan: Plan
    settings: Settings
    reasons: tuple[Reason, ...]
    targets: tuple[Target, ...]
    gpus: tuple[Gpu, ...]
    commands: tuple[str, ...]
    devices_needed: int | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return self.plan.to_dict() | {
            "model": self.name,
            "device": self.hardware.device.name,
            "devices": self.hardware.count,
            "devices_needed": self.devices_needed,
            "workload": asdict(self.demand.workload),
            "workload_source": self.demand.source,
            "settings": asdict(self.settings),
            "reasons": [dict(zip(("setting", "value", "why"), row, strict=True)) for row in self.reasons],
            "targets": [asdict(target) | {"met": target.met} for target in self.targets],
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "command": self.commands[0],
            "commands": list(self.commands),
            "notes": list(self.notes),
        }

    def check(self) -> None:
        """Raises ConfigError if the sessions do not fit on any step, and says how many GPUs would hold them."""
        if self.plan.enough:
            return
        device, wanted = self.hardware.device.name, self.demand.workload.sessions
        hint = (
            f"{self.devices_needed} x {device} would hold them." if self.devices_needed else "No number of these would."
        )
        raise ConfigError(
            f"{wanted:,} sessions do not fit {self.hardware.count} x {device} on any step of the ladder: "
            f"{self.plan.sessions.low:,} do",
            hint=hint + " Or fewer sessions, or shorter ones.",
        )


@dataclass(frozen=True, slots=True)
class _Ask:
    """Everything `make_plan` takes but the number of devices."""

    spec: ModelSpec
    hardware: Hardware
    demand: Demand
    name: str
    engine: str
    kv: str
    known: Calibration | None
    weight_bytes: int

    def plan(self, count: int) -> Plan:
        own = self.kv in _OWN_KV
        return make_plan(
            self.spec,
            self.hardware.device,
            count,
            self.demand.workload,
            model=self.name,
            engine=self.engine,
            weight_bytes=self.weight_bytes,
            kv_dtype="auto" if own else self.kv,
            allow_fp8_kv=not own,
            known=self.known,
        )


def answer(model: str, question: PlanQuestion) -> PlanAnswer:
    """Plans. ConfigError for what is wrong in the question, or a model that no number of these GPUs holds."""
    hardware, engine = _hardware(question), _engine(question)
    kv = _kv(question.kv, engine)
    spec, wanted = load_spec(model), demand(question)
    name, naming = _load_as(model, question.load_as, engine)
    known, logged = _calibrated(question.calibrate)
    ask = _Ask(spec, hardware, wanted, name, engine, kv, known, _weight_bytes(spec, model, question, logged))
    plan = _planned(ask)
    load = _seen(plan, wanted)
    settings, targets = aim(plan, load, question.ttft_ms, question.tpot_ms)
    notes = (*(note for note in (hardware.note, naming) if note), *wanted.notes, *_assumptions(plan))
    return PlanAnswer(
        name=name,
        hardware=hardware,
        demand=wanted,
        plan=plan,
        settings=settings,
        reasons=tuple(reasons(plan, settings, load)),
        targets=tuple(targets),
        gpus=layout(plan, hardware.count),
        commands=tuple(_commands(plan, settings, hardware)),
        devices_needed=None if plan.enough else _enough_devices(ask, plan),
        notes=notes,
    )


def _hardware(question: PlanQuestion) -> Hardware:
    if (question.gpu is None) == (question.gpu_gib is None):
        raise ConfigError("give --gpu, such as 8xH100, or --gpu-gib, such as 8x80: one of the two")
    return named(question.gpu) if question.gpu is not None else sized(question.gpu_gib or "")


def _engine(question: PlanQuestion) -> str:
    if question.engine not in ENGINES:
        raise ConfigError(f"no plan for engine {question.engine!r}", hint="Known: vllm, sglang, llama-server.")
    return ENGINES[question.engine]


def _kv(kind: str, engine: str) -> str:
    """`auto` lets the ladder choose, `model` (f16, bf16) never quantises, others start quantised."""
    known = {"auto", "fp8", *_OWN_KV} | (_LLAMA_KV if engine == "llamacpp" else set())
    if kind not in known:
        raise ConfigError(f"--kv {kind!r} is not known for this engine", hint=f"Known: {', '.join(sorted(known))}.")
    return kind


def _load_as(model: str, given: str | None, engine: str) -> tuple[str, str]:
    """What the engine is to load, and a note where that is not sure."""
    path = Path(model).expanduser()
    name = given or (str(path.parent) if path.name == "config.json" and path.is_file() else model)
    if given is None and path.is_file() and path.suffix == ".json" and path.name != "config.json":
        return name, "the engine cannot load this file: give the model's id or folder with --load-as"
    if engine == "llamacpp" and not name.endswith(".gguf"):
        return (
            name,
            "llama-server loads a GGUF file: give it with --load-as; weights are counted as the config has them",
        )
    return name, ""


def _calibrated(path: Path | None) -> tuple[Calibration | None, int | None]:
    """What the log says; its weights are of one of its ranks, the plan's may be split otherwise."""
    if path is None:
        return None, None
    if not path.is_file():
        raise ConfigError(f"there is no log at '{path}'")
    if path.stat().st_size > _LARGEST_LOG:
        raise ConfigError(f"{path} is longer than 4 MiB: give its start-up part")
    text = path.read_text(encoding="utf-8", errors="replace")
    known = calibrate(text)
    ranks = _LOG_RANKS.search(text)
    if known.weights is None:
        return known, None
    return replace(known, weights=None), known.weights * max(1, int(ranks.group(1)) if ranks else 1)


def _weight_bytes(spec: ModelSpec, model: str, question: PlanQuestion, logged: int | None) -> int:
    """The size as given, as logged, of the folder's weight files, or counted from the config."""
    if question.weights_gib is not None:
        return int(question.weights_gib * 2**30)
    if logged is not None:
        return logged
    folder = Path(model).expanduser()
    files = itertools.islice(folder.glob("*.safetensors"), MOST_WEIGHT_FILES) if folder.is_dir() else ()
    size = sum(file.stat().st_size for file in files)
    if size:
        return size
    try:
        return spec.weight_bytes()
    except ConfigError as error:
        raise ConfigError(error.message, hint="Give the size of the weight files: --weights-gib N.") from error


def _planned(ask: _Ask) -> Plan:
    """The plan; if the model is too large for the devices, the error says how many would do."""
    try:
        return ask.plan(ask.hardware.count)
    except ConfigError as error:
        need = _first_that_starts(ask)
        if need is None:
            raise
        raise ConfigError(
            error.message, hint=f"It starts on {need} x {ask.hardware.device.name}. {error.hint}"
        ) from error


def _first_that_starts(ask: _Ask) -> int | None:
    for count in (2, 4, 8, 16):
        if count > ask.hardware.count:
            try:
                ask.plan(count)
            except ConfigError:  # still too small, or not to be split so
                continue
            return count
    return None


def _enough_devices(ask: _Ask, plan: Plan) -> int | None:
    """The fewest devices whose plan is enough: bisected below what replicas alone would need."""
    if plan.sessions.low < 1:
        return None
    low, high = ask.hardware.count, -(-ask.demand.workload.sessions // plan.sessions.low) * ask.hardware.count
    if high > MOST_GPUS:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if ask.plan(middle).enough else (middle, high)
    return high


def _seen(plan: Plan, wanted: Demand) -> Workload:
    limit = plan.deployment.spec.max_context_tokens
    return wanted.workload.capped(limit) if limit is not None else wanted.workload


def _commands(plan: Plan, settings: Settings, hardware: Hardware) -> list[str]:
    """A command a replica, each on its own GPUs and port."""
    ranks, variable = plan.deployment.ranks, _visible(hardware.device.name)
    lines = []
    for replica in range(plan.replicas):
        line = command(plan.engine, replace(settings, port=settings.port + replica))
        if hardware.count > ranks:
            first = replica * ranks
            line = f"{variable}={shlex.quote(','.join(map(str, range(first, first + ranks))))} {line}"
        lines.append(line)
    return lines


def _visible(device: str) -> str:
    if device.startswith("MI"):
        return "HIP_VISIBLE_DEVICES"
    return "HABANA_VISIBLE_DEVICES" if device.startswith("Gaudi") else "CUDA_VISIBLE_DEVICES"


def _assumptions(plan: Plan) -> tuple[str, ...]:
    return tuple(f"assumed {item.field} = {item.value} ({item.reason})" for item in plan.assumed)
