"""`kvsteward ledger`: a model by path or id, and its account for a person or a program.

Finds the model (a `config.json`, a folder with one, a GGUF file, or a Hugging Face id where there is internet) and
shows what the ledger computes. The arithmetic is `kvsteward.ledger`'s alone.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvsteward.engines.gguf import describe_gguf
from kvsteward.errors import ConfigError
from kvsteward.ledger import Account, Capacity, ModelSpec, account, capacity_tokens

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_MAX_CONFIG_BYTES = 16 * 2**20
_FETCH_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class LedgerQuestion:
    """What is to be counted."""

    context_tokens: int = 8_192
    sessions: int = 1
    kv: str = "auto"
    tp: int = 1
    pp: int = 1
    kv_gib: float | None = None
    engine: str = "vllm"


@dataclass(frozen=True, slots=True)
class LedgerAnswer:
    """The account of one sequence, of all sessions, and what a pool of the given size holds."""

    source: str
    spec: ModelSpec
    question: LedgerQuestion
    one: Account
    capacity: Capacity | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.source,
            "architecture": self.spec.architecture,
            "weight_bytes": self.spec.weight_bytes(),
            "tp": self.question.tp,
            "pp": self.question.pp,
            "sessions": self.question.sessions,
            "bytes_per_token": self.one.bytes_per_token,
            "bytes_per_session": self.one.total_bytes,
            "bytes_all_sessions": self.one.total_bytes * self.question.sessions,
            "account": self.one.to_dict(),
            "capacity": self.capacity.to_dict() if self.capacity else None,
        }


def load_spec(source: str) -> ModelSpec:
    """The spec of a model by path or id. Raises ConfigError that says what was looked for, or what is missing in it."""
    path = Path(source).expanduser()
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".gguf" and path.exists():
        return describe_gguf(path).spec
    if path.exists():
        return ModelSpec.from_hf_config(_config(path.read_bytes(), str(path)))
    if _HUB_ID.fullmatch(source):
        return ModelSpec.from_hf_config(_fetched(source))
    raise ConfigError(
        f"there is no model at '{source}'",
        hint="Give a config.json, a folder with one, a GGUF file, or a Hugging Face id such as Qwen/Qwen2.5-7B.",
    )


def _config(raw: bytes, where: str) -> dict[str, Any]:
    if len(raw) > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{where} has {len(raw)} bytes: that is no model config")
    try:
        config = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{where} holds no JSON object")
    return config


def _fetched(model_id: str) -> dict[str, Any]:
    url = f"https://huggingface.co/{model_id}/resolve/main/config.json"
    try:
        with urllib.request.urlopen(url, timeout=_FETCH_LIMIT_S) as response:
            return _config(response.read(_MAX_CONFIG_BYTES + 1), url)
    except urllib.error.HTTPError as error:
        raise ConfigError(f"the hub has no config of '{model_id}' for us (status {error.code})") from error
    except (urllib.error.URLError, TimeoutError) as error:
        raise ConfigError(
            f"'{model_id}' is no path here, and the hub cannot be reached: {error}",
            hint="Download the model's config.json and give its path.",
        ) from error


def answer(source: str, question: LedgerQuestion) -> LedgerAnswer:
    """Counts. `question.kv` is one format, or K and V apart as `K:V`."""
    spec = load_spec(source)
    k_dtype, _, v_dtype = question.kv.partition(":")
    v_dtype = v_dtype or k_dtype
    one = account(spec, question.context_tokens, k_dtype=k_dtype, v_dtype=v_dtype, tp=question.tp, pp=question.pp)
    capacity = None
    if question.kv_gib is not None:
        capacity = capacity_tokens(
            spec,
            int(question.kv_gib * 2**30),
            engine=question.engine,
            max_model_len=question.context_tokens,
            tp=question.tp,
            pp=question.pp,
            k_dtype=k_dtype,
            v_dtype=v_dtype,
        )
    return LedgerAnswer(source, spec, question, one, capacity)


def show(found: LedgerAnswer, console: Console) -> None:
    """The account as tables: every figure with the formula that gave it and the rule's source."""
    question, one = found.question, found.one
    rank = " on the fullest rank" if question.tp * question.pp > 1 else ""
    console.print(f"[bold]{found.source}[/] ({found.spec.architecture})")
    console.print(
        f"{one.bytes_per_token:,} bytes of KV cache per token{rank}; "
        f"{question.context_tokens:,} tokens: {size(one.total_bytes)}; "
        f"{question.sessions:,} session{'s' * (question.sessions != 1)}: "
        f"[bold]{size(one.total_bytes * question.sessions)}[/]; "
        f"weights: {size(found.spec.weight_bytes())}"
    )
    console.print(_table(f"One sequence of {question.context_tokens:,} tokens{rank}", one.rows()))
    if found.capacity is not None:
        console.print(_table(f"A pool of {question.kv_gib:g} GiB in {question.engine}", found.capacity.rows()))
        console.print(
            f"It holds [bold]{found.capacity.tokens:,}[/] tokens, {found.capacity.requests:.2f} such requests."
        )
    for item in one.assumed:
        console.print(f"[yellow]assumed[/] {item.field} = {item.value} ({item.reason})")


def size(count: int) -> str:
    """Bytes for a person, decimal and binary."""
    return f"{count / 1e9:,.1f} GB ({count / 2**30:,.2f} GiB)" if count >= 10**8 else f"{count:,} bytes"


def _table(title: str, rows: list[tuple[str, str, str, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    table.add_column("what", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("how", overflow="fold")
    table.add_column("source", overflow="fold", style="dim")
    for row in rows:
        table.add_row(*row)
    return table
