"""What engines printed about their own caches, and what the ledger says of the same model, flags and bytes.

One check per kind of report. Each returns an Outcome; "exact" means the printed integer, or a figure inside the
rounding of the printed one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsteward.ledger import ModelSpec, tokens_in
from kvsteward.ledger.alloc import llamacpp, sglang, vllm

DATA = Path(__file__).parent / "data"
GIB = 2**30
MIB = 2**20
SWAP_BYTES = 4 * GIB
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`grade` is exact, explained, consistent or listed; `ok` whether the check of that grade holds."""

    grade: str
    ok: bool
    ours: str
    printed: str
    why: str = ""


def rows() -> list[Row]:
    return [json.loads(line) for line in (DATA / "kv_reports.jsonl").read_text().splitlines()]


def models() -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = json.loads((DATA / "models.json").read_text())
    return loaded


def spec_of(row: Row, *, dtype: str | None = None) -> ModelSpec:
    config = dict(models()[row["config"]])
    dtype = dtype or row["settings"].get("dtype")
    if dtype:
        config["torch_dtype"] = config["dtype"] = dtype
    return ModelSpec.from_hf_config(config)


def vllm_layout(row: Row) -> vllm.Layout:
    settings = row["settings"]
    names = (
        "block_tokens", "max_model_len", "max_num_batched_tokens", "tp", "pp", "dcp", "prefix_caching",
        "draft_tokens", "attention_block_tokens",
    )  # fmt: skip
    chosen = {name: settings[name] for name in names if name in settings}
    kv_dtype = str(settings.get("kv_cache_dtype", "auto")).split(" ")[0]
    version = tuple(settings.get("version", (0, 19)))
    return vllm.layout(spec_of(row), vllm.VLLM(version=version, kv_dtype=kv_dtype, **chosen))


def _gib_interval(row: Row) -> tuple[int, int]:
    gib, settings = row["reported"]["available_kv_gib"], row["settings"]
    if settings.get("exact_gib"):
        return int(gib * GIB), int(gib * GIB)
    half = 0.5 * 10 ** -settings.get("gib_digits", 2)
    return int((gib - half) * GIB), int((gib + half) * GIB)


def _facts(made: vllm.Layout, row: Row, blocks: int) -> bool:
    """Do `blocks` give every figure that was printed?"""
    printed, settings = row["reported"], row["settings"]
    length = printed.get("max_concurrency_at")
    if (
        "kv_tokens" in printed
        and not settings.get("derived_tokens")
        and made.printed_tokens(blocks) != printed["kv_tokens"]
    ):
        return False
    if "num_gpu_blocks" in printed and blocks != printed["num_gpu_blocks"]:
        return False
    concurrency = printed.get("max_concurrency")
    return not (concurrency and length) or abs(made.concurrency(blocks, length) - concurrency) <= 0.0051


def vllm_pool(row: Row) -> Outcome:
    made, printed = vllm_layout(row), row["reported"]
    low, high = (made.blocks(end) for end in _gib_interval(row))
    found = [blocks for blocks in range(low, high + 1) if _facts(made, row, blocks)]
    ours = f"{made.printed_tokens(low):,}..{made.printed_tokens(high):,} tokens"
    if row["verdict"].startswith("explained") and not found:
        return _poorest_stage(row, made, high)
    return Outcome("exact", bool(found), ours, f"{printed.get('kv_tokens', 0):,}")


def _poorest_stage(row: Row, made: vllm.Layout, high: int) -> Outcome:
    """Pipeline stages: the printed GiB is one stage's, the blocks are those of the stage that also holds the head."""
    printed = row["reported"]
    rich = _gib_interval(row)[1]
    head_bytes = 128_256 * 4_096 * 2
    ranks = [rich, rich, rich, rich - head_bytes]
    least = vllm.blocks_over_ranks(made, ranks)
    ok = least <= printed["num_gpu_blocks"] <= high
    ours = f"{least:,}..{high:,} blocks"
    return Outcome("explained", ok, ours, f"{printed['num_gpu_blocks']:,}", "minimum over pipeline stages")


def vllm_factor(row: Row) -> Outcome:
    """No bytes were printed: some whole number of blocks must give the token line and the concurrency."""
    made, printed = vllm_layout(row), row["reported"]
    length = printed["max_concurrency_at"]
    guess = printed["kv_tokens"] * made.pages(length) // length
    if made.settings.version < vllm.CONCURRENCY_LINE_SINCE:
        guess = printed["kv_tokens"] // made.block_tokens * made.group_count
    near = range(max(1, guess - made.group_count), guess + made.group_count + 2)
    found = [blocks for blocks in near if _facts(made, row, blocks)]
    ours = f"{found[0]:,} blocks / {made.pages(length)} a request" if found else f"no block count near {guess}"
    return Outcome("exact", bool(found), ours, f"{printed['kv_tokens']:,}")


def vllm_override(row: Row) -> Outcome:
    made, printed = vllm_layout(row), row["reported"]
    low, high = (made.blocks(end) for end in _gib_interval(row))
    ok = low <= printed["num_gpu_blocks"] <= high and made.printed_tokens(printed["override"]) == printed["kv_tokens"]
    ok = ok and made.usable_blocks(printed["override"]) == printed["usable_blocks"]
    return Outcome("exact", ok, f"{low:,}..{high:,} blocks", f"{printed['num_gpu_blocks']:,}")


def vllm_dcp(row: Row) -> Outcome:
    made, printed = vllm_layout(row), row["reported"]
    one_block = made.block_tokens * made.settings.dcp
    ours = row["settings"]["one_rank_tokens"] * made.settings.dcp
    return Outcome("exact", abs(ours - printed["kv_tokens"]) <= one_block, f"{ours:,}", f"{printed['kv_tokens']:,}")


def cpu_blocks(row: Row) -> Outcome:
    made, printed = vllm_layout(row), row["reported"]
    ours = made.blocks(SWAP_BYTES)
    ok = ours == printed["num_cpu_blocks"]
    if "total_gib" in row["settings"]:
        ok = ok and budget(row).ok
    return Outcome("exact", ok, f"{ours:,} CPU blocks", f"{printed['num_cpu_blocks']:,}")


def budget(row: Row) -> Outcome:
    printed, settings = row["reported"], row["settings"]
    ours = vllm.available_bytes(
        settings["total_gib"],
        settings["utilization"],
        weights=printed["weights_gib"],
        non_torch=printed["non_torch_gib"],
        activation=printed["activation_gib"],
    )
    close = abs(ours - printed["available_kv_gib"]) <= 0.02
    return Outcome("exact", close, f"{ours:.2f} GiB", f"{printed['available_kv_gib']} GiB")


def request_gib(row: Row) -> Outcome:
    printed = row["reported"]
    ours = spec_of(row).kv_bytes(printed["max_model_len"], tp=row["settings"].get("tp", 1)) / GIB
    return Outcome("exact", ours == printed["needed_gib"], f"{ours} GiB", f"{printed['needed_gib']} GiB")


def sglang_pools(row: Row) -> Outcome:
    printed, chosen = row["reported"], row["settings"]
    settings = sglang.SGLang(
        tp=chosen.get("tp", 1),
        kv_dtype=chosen.get("kv_cache_dtype", "auto"),
        draft_tokens=chosen.get("draft_tokens", 0),
    )
    made = sglang.sized(spec_of(row), printed["tokens"], printed.get("mamba_slots", 0), settings)
    ours = {
        "K_gb": made.k_bytes,
        "V_gb": made.v_bytes,
        "target_K_gb": made.k_bytes,
        "draft_K_gb": made.draft_bytes / 2,
        "ssm_gb": _states(row, made, "ssm"),
        "conv_gb": _states(row, made, "conv"),
    }
    wrong = [key for key, value in ours.items() if key in printed and abs(value / GIB - printed[key]) > 0.0051]
    shown = ", ".join(f"{key} {ours[key] / GIB:.3f}" for key in ours if key in printed)
    return Outcome("exact", not wrong, shown, ", ".join(f"{printed[key]}" for key in ours if key in printed))


def _states(row: Row, made: sglang.Pools, name: str) -> int:
    spec, tp = spec_of(row), row["settings"].get("tp", 1)
    tensors = [tensor for layer in spec.layers for tensor in layer.state if tensor.name.startswith(name)]
    return (made.state_slots + 1) * sum(tensor.size_bytes(tp) for tensor in tensors)


def llama_buffers(row: Row) -> Outcome:
    settings = dict(row["settings"])
    part = settings.pop("part")
    made = llamacpp.buffers(spec_of(row), llamacpp.LlamaCpp(**settings))
    sizes = {
        "kv": made.kv_bytes + (made.window_bytes if settings.get("swa_full") else 0),
        "window": made.window_bytes,
        "state": made.state_bytes,
        "total": made.total_bytes,
        "k": made.k_bytes,
    }
    ours, printed = sizes[part] / MIB, row["reported"]["kv_mib"]
    return Outcome("exact", abs(ours - printed) <= 0.0051, f"{ours:.3f} MiB", f"{printed} MiB")


def pool_bytes(row: Row) -> Outcome:
    printed = row["reported"]
    ours = spec_of(row).kv_bytes(printed["kv_tokens"], kv_dtype=row["settings"].get("kv_cache_dtype", "auto"))
    if "kv_bytes" in printed:
        return Outcome("exact", ours == printed["kv_bytes"], f"{ours:,} B", f"{printed['kv_bytes']:,} B")
    close = abs(ours / GIB - printed["allocated_gib"]) <= 0.0051
    return Outcome("exact", close, f"{ours / GIB:.3f} GiB", f"{printed['allocated_gib']} GiB")


def trt_blocks(row: Row) -> Outcome:
    printed = row["reported"]
    ours = tokens_in(spec_of(row), int(0.9 * printed["available_gib"] * GIB), block_tokens=64).blocks
    ok = printed["num_blocks"] - 1 == ours
    return Outcome("explained", ok, f"{ours} blocks", f"{printed['num_blocks']}", "the engine rounds up")


def about(row: Row) -> Outcome:
    """Figures that the source itself rounds or doubles: within what the report says, and never called exact."""
    printed = row["reported"]
    if row["id"] == "mlc-2026":
        ours = spec_of(row).kv_bytes(printed["max_total_sequence_length"]) / MIB
        ok = 0 < printed["kvcache_mb"] - ours < 60
        return Outcome("explained", ok, f"{ours:.1f} MiB", f"{printed['kvcache_mb']} MiB", "pages, auxiliary arrays")
    if row["id"] == "hfblog-405b":
        ours = spec_of(row).kv_bytes(128_000) / MIB
        ok = abs(2 * ours - printed["kv_mib"]) < 10
        return Outcome(
            "explained", ok, f"{ours:.0f} MiB", f"{printed['kv_mib']:.0f} MiB", "the table is twice too high"
        )
    ours = spec_of(row).kv_bytes_per_token() * printed["kv_tokens"] / GIB
    return Outcome("explained", 6.3 <= ours < 6.45, f"{ours:.2f} GiB", "~6.4 GiB", "windows kept at full length")


def line_change(row: Row) -> Outcome:
    """0.20 printed blocks // groups x block, 0.21 concurrency x length: the same bytes, another meaning."""
    printed, spec = row["reported"], spec_of(row)
    length, pool = 262_144, 50 * 10**9
    made = vllm.layout(spec, vllm.VLLM(version=(0, 21), max_model_len=length, max_num_batched_tokens=2048))
    flat = vllm.layout(spec, vllm.VLLM(version=(0, 20), max_model_len=length, hybrid_manager=False))
    new, old = made.printed_tokens(made.blocks(pool)), flat.printed_tokens(flat.blocks(pool))
    ok = abs(old / printed["kv_tokens_v020"] - 1) < 0.05 and abs(new / printed["kv_tokens_v021"] - 1) < 0.05
    return Outcome("explained", ok, f"{old:,} -> {new:,}", "~55,000 -> ~525,000", "the token line changed its meaning")


def simulator(row: Row) -> Outcome:
    made = vllm_layout(row)
    printed = row["reported"]
    ok = made.printed_tokens(printed["num_gpu_blocks"]) == printed["kv_tokens"]
    return Outcome("consistent", ok, f"{made.printed_tokens(printed['num_gpu_blocks']):,}", f"{printed['kv_tokens']:,}")


def replicated(row: Row) -> Outcome:
    """A latent is on every rank: eight data-parallel engines hold eight times what one of TP 8 does."""
    spec, printed = spec_of(row), row["reported"]
    ideal = 8 * spec.kv_bytes_per_token(tp=8) / spec.kv_bytes_per_token(tp=1)
    seen = printed["max_concurrency_dp8"] / printed["max_concurrency_tp8"]
    return Outcome("explained", ideal == 8 and 0.95 < seen / ideal <= 1, f"{ideal:.0f}x", f"{seen:.2f}x", "replicated")


def tp_gain(row: Row) -> Outcome:
    spec, printed = spec_of(row), row["reported"]
    ours = spec.kv_bytes_per_token(tp=1) / spec.kv_bytes_per_token(tp=4)
    seen = printed["blocks_after"] / printed["blocks_before"]
    return Outcome("exact", round(seen, 2) == ours, f"{ours:.0f}x", f"{seen:.3f}x")


def implausible(row: Row) -> Outcome:
    printed = row["reported"]
    ours = spec_of(row).kv_bytes(16 * printed["vllm_blocks_claimed"]) / GIB
    return Outcome("explained", ours > 24, f"{ours:.1f} GiB", "24 GiB card", "the claimed pool cannot be on the card")


def self_consistent(row: Row) -> Outcome:
    printed = row["reported"]
    ours = printed["kv_tokens"] / printed["max_concurrency_at"]
    return Outcome(
        "consistent",
        abs(ours / printed["max_concurrency"] - 1) < 0.01,
        f"{ours:.2f}x",
        f"{printed['max_concurrency']}x",
    )


def consistent(row: Row) -> Outcome:
    printed = row["reported"]
    ours = printed["available_kv_gib"] * GIB / printed["kv_tokens"]
    ok = abs(ours / (40 * 4 * 128 * 2 * 2 / 2) - 1) < 0.001 or abs(ours / 81_920 - 1) < 0.001
    return Outcome("consistent", ok, f"{ours:,.0f} B/token", "81,920 B/token")


def listed(row: Row) -> Outcome:
    return Outcome("listed", True, "-", "-", row["why"] or "report only: no figure to compute, or the model is unknown")


CHECKS: dict[str, Callable[[Row], Outcome]] = {
    "vllm_pool": vllm_pool,
    "vllm_factor": vllm_factor,
    "vllm_override": vllm_override,
    "vllm_dcp": vllm_dcp,
    "cpu_blocks": cpu_blocks,
    "budget": budget,
    "request_gib": request_gib,
    "sglang": sglang_pools,
    "llamacpp": llama_buffers,
    "bytes": pool_bytes,
    "trt_blocks": trt_blocks,
    "bytes_about": about,
    "line_change": line_change,
    "simulator": simulator,
    "replicated": replicated,
    "tp_gain": tp_gain,
    "implausible": implausible,
    "self_consistent": self_consistent,
    "consistent": consistent,
    "listed": listed,
}


def outcomes() -> Iterator[tuple[Row, Outcome]]:
    for row in rows():
        yield row, CHECKS[row["check"]](row)
