"""Policies as YAML: what a deployment keeps, reduces and moves, in one file that a person can read.

    base: support                # begin with a preset or another file; what stands here wins
    compact: true                # false: no window; a conversation that no longer fits is refused
    summary: engine              # or extractive
    answer_tokens: 512
    marks: {high: 0.85, low: 0.40, block: 0.25, memory_price: 0}
    plan:                        # stays word for word
      by_rules: true             # false: only what callers mark
      goal: true
      promises: 4
      patterns: ['\\bSLA\\b']
      unsure: rules              # engine: its model says what sentences are that rules are unsure of
    fact:
      keep: ['#W\\d{7}']          # values that are always kept
    trace:
      verbatim_rounds: 3
      tool_limit_tokens: 600     # null: a sixteenth of the budget
      reduce: true               # false: nothing is shortened on entry
      prose: extractive          # engine: its model writes long prose shorter
      selective: null            # of long prose, the share to keep, as the engine's log-probabilities say
    hygiene:
      enabled: true
      tools: true
      default_rules: true
      rules: [{name: build, match: '^build \\d+', note: false}]

Reads files that it is given, nothing else. Invariants: an unknown key or a wrong type is a ConfigError that names the
field; `parse_policy(dump_policy(p)) == p`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kvsteward.context.hygiene import RULES, Hygiene, Rule
from kvsteward.context.marks import Policy
from kvsteward.context.plan import PlanRules
from kvsteward.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
MAX_BASES = 8
_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<at>[^`]*)`)?$", re.S)


class _Struct(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A section of the file."""


class _Marks(_Struct, frozen=True):
    high: float = 0.85
    low: float = 0.40
    block: float = 0.25
    memory_price: float = 0.0


class _Plan(_Struct, frozen=True):
    by_rules: bool = True
    goal: bool = True
    promises: int = 4
    patterns: tuple[str, ...] = ()
    unsure: str = "rules"


class _Fact(_Struct, frozen=True):
    keep: tuple[str, ...] = ()


class _Trace(_Struct, frozen=True):
    verbatim_rounds: int = 3
    tool_limit_tokens: int | None = None
    reduce: bool = True
    prose: str = "extractive"
    selective: float | None = None


class _Rule(_Struct, frozen=True):
    name: str
    match: str
    until: str = ""
    going_on: str = ""
    note: bool = True


class _Hygiene(_Struct, frozen=True):
    enabled: bool = True
    tools: bool = True
    default_rules: bool = True
    rules: tuple[_Rule, ...] = ()


class _File(_Struct, frozen=True):
    base: str | None = None
    about: str = ""
    compact: bool = True
    summary: str = "engine"
    answer_tokens: int = 512
    marks: _Marks = _Marks()
    plan: _Plan = _Plan()
    fact: _Fact = _Fact()
    trace: _Trace = _Trace()
    hygiene: _Hygiene = _Hygiene()


def presets() -> dict[str, str]:
    """The text of each preset by its name."""
    folder = resources.files("kvsteward.context") / "presets"
    files = [file for file in folder.iterdir() if file.name.endswith(".yaml")]
    return {file.name.removesuffix(".yaml"): file.read_text("utf-8") for file in sorted(files, key=lambda f: f.name)}


def load_policy(name: str, folder: Path | None = None) -> Policy:
    """A preset by its name, or a file (relative to `folder`). Raises ConfigError."""
    return parse_policy(*_text(name, folder))


def parse_policy(text: str, name: str = "policy", folder: Path | None = None) -> Policy:
    """A policy from YAML. `name` is said in errors; `folder` is where `base` may name a file."""
    file = _checked(_merged(text, name, folder, 0), name)
    try:
        return _policy(file)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message}", param=error.param) from None


def dump_policy(policy: Policy) -> str:
    """All of a policy as YAML, with the values that it has by default."""
    rules = [r for r in policy.hygiene.rules if r not in RULES]
    file = _File(
        about=policy.about,
        compact=policy.compact,
        summary=policy.summary,
        answer_tokens=policy.answer_tokens,
        marks=_Marks(policy.high_water_ratio, policy.low_water_ratio, policy.block_ratio, policy.memory_price),
        plan=_Plan(
            policy.plan.by_rules, policy.plan.goal, policy.plan.promises, policy.plan.patterns, policy.plan.unsure
        ),
        fact=_Fact(policy.keep),
        trace=_Trace(policy.keep_rounds, policy.tool_limit_tokens, policy.reduce, policy.prose, policy.selective),
        hygiene=_Hygiene(
            policy.hygiene.enabled,
            policy.hygiene.tools,
            all(rule in policy.hygiene.rules for rule in RULES),
            tuple(_Rule(r.name, r.match, r.until, r.going_on, r.note) for r in rules),
        ),
    )
    values = msgspec.to_builtins(file)
    values.pop("base")
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=110)
    return text


def _policy(file: _File) -> Policy:
    own = tuple(Rule(r.name, r.match, r.until, r.going_on, r.note) for r in file.hygiene.rules)
    return Policy(
        about=file.about,
        compact=file.compact,
        reduce=file.trace.reduce,
        high_water_ratio=file.marks.high,
        low_water_ratio=file.marks.low,
        block_ratio=file.marks.block,
        memory_price=file.marks.memory_price,
        keep_rounds=file.trace.verbatim_rounds,
        tool_limit_tokens=file.trace.tool_limit_tokens,
        prose=file.trace.prose,
        selective=file.trace.selective,
        summary=file.summary,
        answer_tokens=file.answer_tokens,
        keep=file.fact.keep,
        plan=PlanRules(file.plan.by_rules, file.plan.patterns, file.plan.goal, file.plan.promises, file.plan.unsure),
        hygiene=Hygiene(
            file.hygiene.enabled, file.hygiene.tools, (*own, *(RULES if file.hygiene.default_rules else ()))
        ),
    )


def _text(name: str, folder: Path | None) -> tuple[str, str, Path | None]:
    """Text, name and folder of a preset or a file."""
    known = presets()
    if name in known:
        return known[name], name, None
    path = (folder or Path()) / name
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes; a policy is not")
        return path.read_text("utf-8"), str(path), path.parent
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"there is no policy {name!r}: {getattr(error, 'strerror', None) or error}",
            hint=f"Name a YAML file, or a preset: {', '.join(known)}.",
            param="policy",
        ) from None


def _merged(text: str, name: str, folder: Path | None, depth: int) -> dict[str, Any]:
    """The values of a file over those of its base."""
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{name} is not YAML: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{name} must be a mapping of settings", hint="kvsteward policy show coding prints one.")
    base = values.get("base")
    if base is None:
        return values
    if not isinstance(base, str) or depth >= MAX_BASES:
        raise ConfigError(f"{name}: base must name a preset or a file, and bases end after {MAX_BASES}", param="base")
    _checked(values, name)  # what is wrong here must not be said of the base
    return _over(_merged(*_text(base, folder), depth + 1), values)


def _over(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    return {
        **under,
        **{
            k: _over(under[k], v) if isinstance(v, dict) and isinstance(under.get(k), dict) else v
            for k, v in over.items()
        },
    }


def _checked(values: dict[str, Any], name: str) -> _File:
    try:
        return msgspec.convert(values, _File)
    except msgspec.ValidationError as error:
        match = _AT.match(str(error))
        what, at = (match["what"], match["at"] or "") if match else (str(error), "")
        unknown = re.search(r"unknown field `(.*)`", what)
        field = ".".join(part for part in (at, unknown[1] if unknown else "") if part)
        said = "there is no such setting" if unknown else what[:1].lower() + what[1:].replace("`", "")
        raise ConfigError(f"{name}: {field or 'the file'}: {said}", param=field or None) from None


def with_options(policy: Policy, **options: Any) -> Policy:
    """The policy with what a command line says besides. None: not said."""
    return replace(policy, **{name: value for name, value in options.items() if value is not None})
