"""What the scheduler's process tells the API server of idle sessions: a bounded dict, for the endpoint and the metrics.

    {"version": 1, "block_tokens": 16, "free_blocks": 900, "turns": 41,
     "heard": 7,                                       words of the endpoint plug-in
     "sessions": {"s-1": [12, 3.5]},                  blocks and idle seconds of the largest sessions
     "others": [3, 40],                               sessions and blocks that are not named
     "hints": {"released": 2, "kept": 30, "refused": 0},   totals since the start
     "waits_s": {"step": 0.002, "copy": 0.01, "request": 0.4}}   the longest since the start

Pure. Invariant: named and unnamed blocks are all blocks of idle sessions, each once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsteward.kv.vllm.steward import Figures

VERSION = 1
MAX_NAMED = 1024
"""Sessions that are named to the API server."""
MAX_LABELS = 20
"""Sessions that are named in Prometheus metrics: each name is a time series for ever."""


def snapshot(figures: Figures, heard: int, waits_s: Mapping[str, float], max_named: int = MAX_NAMED) -> dict[str, Any]:
    named, sessions, blocks = _largest(figures.sessions, max_named)
    return {
        "version": VERSION,
        "block_tokens": figures.block_tokens,
        "free_blocks": figures.free_blocks,
        "turns": figures.turns,
        "heard": heard,
        "sessions": {name: [n, round(figures.idle_s.get(name, 0.0), 1)] for name, n in named.items()},
        "others": [sessions, blocks],
        "hints": {"released": figures.released, "kept": figures.kept, "refused": figures.refused_hints},
        "waits_s": dict(waits_s),
    }


def labelled(data: Mapping[str, Any], max_labels: int = MAX_LABELS) -> tuple[dict[str, int], int, int]:
    """Blocks of the largest sessions, then how many others there are and their blocks."""
    named, sessions, blocks = _largest({name: n for name, (n, _) in data["sessions"].items()}, max_labels)
    return named, sessions + data["others"][0], blocks + data["others"][1]


def listed(by_engine: Mapping[int, tuple[float, Mapping[str, Any]]], now_s: float) -> dict[str, Any]:
    """The endpoint's answer, from each rank's newest snapshot and when it came (s)."""
    blocks: dict[str, int] = {}
    idle_s: dict[str, float] = {}
    others, hints = [0, 0], dict.fromkeys(("released", "kept", "refused"), 0)
    free_blocks, block_tokens, age_s = 0, 0, 0.0
    for came_s, data in by_engine.values():
        age_s = max(age_s, now_s - came_s)
        free_blocks += data["free_blocks"]
        block_tokens = data["block_tokens"]
        others = [a + b for a, b in zip(others, data["others"], strict=True)]
        hints = {kind: count + data["hints"][kind] for kind, count in hints.items()}
        for name, (n, idle) in data["sessions"].items():
            blocks[name] = blocks.get(name, 0) + n
            idle_s[name] = min(idle_s.get(name, idle + now_s - came_s), idle + now_s - came_s)
    total = sum(blocks.values()) + others[1]
    return {
        "object": "list",
        "connector": "kvsteward",
        "version": VERSION,
        "age_s": round(age_s, 3),
        "block_tokens": block_tokens,
        "totals": {
            "sessions": len(blocks) + others[0],
            "blocks": total,
            "tokens": total * block_tokens,
            "free_blocks": free_blocks,
        },
        "hints": hints,
        "data": [
            {"session": name, "blocks": n, "tokens": n * block_tokens, "idle_s": round(idle_s[name], 1)}
            for name, n in sorted(blocks.items(), key=lambda item: (-item[1], item[0]))
        ],
    }


def _largest(blocks: Mapping[str, int], limit: int) -> tuple[dict[str, int], int, int]:
    """The largest ones, and how many others there are with how many blocks."""
    ordered = sorted(blocks.items(), key=lambda item: (-item[1], item[0]))
    rest = ordered[limit:]
    return dict(ordered[:limit]), len(rest), sum(n for _, n in rest)
