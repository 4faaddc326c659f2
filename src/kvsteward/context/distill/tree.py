"""A tree of dicts, lists and scalars as text: leaves by path, arrays of objects as tables, the rest shared fairly.

It does not know the syntax it came from. Invariants: work is bounded by node counts, not by the size of the source;
recursion is bounded by depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsteward.context.distill.asked import asked_parts
from kvsteward.context.distill.base import Hints
from kvsteward.context.distill.columns import Table
from kvsteward.context.distill.meter import Meter
from kvsteward.context.distill.pack import Unit, nearness, pack
from kvsteward.context.distill.prose import sentences
from kvsteward.context.distill.rows import MAX_COLUMNS, MAX_ROWS, lay
from kvsteward.context.distill.salience import Focus, focus_of

MAX_LEAVES = 6_000
_MAX_DEPTH = 40
_MIN_BLOCK_TOKENS = 24
_TIGHT_TOKENS = 120
_ASKED_SHARE = 0.3
_HOPELESS = 5.0
_OUTLINE = 3.0
_EXPANDED_SHARE = 0.5
_NAMES_SHARE = 0.3
_LONG_TEXT_CHARS = 240


@dataclass(frozen=True, slots=True)
class Shown:
    """A tree as text and what was left out."""

    text: str
    note: str


@dataclass(frozen=True, slots=True)
class _Leaf:
    path: str
    value: str


@dataclass(frozen=True, slots=True)
class _Block:
    path: str
    value: Any
    cost: float


def show(value: Any, limit_tokens: float, hints: Hints, meter: Meter) -> Shown:
    """The tree within about the limit: what was asked for first, then the whole in outline."""
    value = _unnest(value)
    focus = focus_of(hints)
    if _weigh(value) <= _HOPELESS * limit_tokens:
        whole = _show(value, float(limit_tokens), focus, meter, 0)
        if not whole.note:
            return whole
    tight = limit_tokens <= _TIGHT_TOKENS
    asked = asked_parts(value, focus, limit_tokens * (0.8 if tight else _ASKED_SHARE), meter)
    if not asked:
        return _show(value, float(limit_tokens), focus, meter, 0)
    room = limit_tokens - sum(meter.tokens(line) + 1 for line in asked) - 4
    rest = _show(value, room - 1, focus, meter, 0) if room >= _MIN_BLOCK_TOKENS else Shown("", "all but what was asked")
    head = "\n".join(asked)
    return Shown(f"asked:\n{head}\nall:\n{rest.text}" if rest.text else head, rest.note)


def _unnest(value: Any) -> Any:
    while isinstance(value, list) and len(value) == 1 and isinstance(value[0], list | dict):
        value = value[0]
    return value


def _show(value: Any, limit: float, focus: Focus, meter: Meter, depth: int) -> Shown:
    if isinstance(value, Mapping):
        return _show_dict(value, limit, focus, meter, depth)
    if isinstance(value, list):
        return _show_list(value, limit, focus, meter, depth)
    return _show_text(scalar(value), limit, focus, meter)


def scalar(value: Any) -> str:
    """A scalar as its source would write it, strings without quotes."""
    if isinstance(value, str):
        return value
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _show_text(text: str, limit: float, focus: Focus, meter: Meter) -> Shown:
    if meter.tokens(text[: int(limit * 12) + 100]) <= limit and len(text) <= limit * 12:
        return Shown(text, "")
    units = [Unit(sentence) for sentence in sentences(text[:60_000])]
    packed = pack(units, limit, focus, meter, "sentences", " ")
    return Shown(packed.text, f"{packed.total - packed.kept} of {packed.total} sentences")


def _show_list(items: Sequence[Any], limit: float, focus: Focus, meter: Meter, depth: int) -> Shown:
    total = len(items)
    if not total:
        return Shown("[]", "")
    items = sampled(items)
    table = as_table(items, total)
    if table is not None:
        laid = lay(table, limit, focus, meter)
        return Shown(laid.text, laid.note)
    numbers = [item for item in items if isinstance(item, int | float) and not isinstance(item, bool)]
    if len(numbers) == len(items) and total > 24:
        return _show_numbers(numbers, total)
    if depth >= _MAX_DEPTH:
        return Shown(f"[{total} items]", f"{total} items")
    return _show_dict({str(i): item for i, item in enumerate(items)}, limit, focus, meter, depth)


def sampled(items: Sequence[Any]) -> Sequence[Any]:
    """At most MAX_ROWS items: the head, and the tail."""
    if len(items) <= MAX_ROWS:
        return items
    return [*items[: MAX_ROWS * 2 // 3], *items[-MAX_ROWS // 3 :]]


def _show_numbers(numbers: Sequence[float], total: int) -> Shown:
    head = ", ".join(map(str, numbers[:8]))
    tail = ", ".join(map(str, numbers[-4:]))
    stats = f"min {min(numbers)}, max {max(numbers)}, mean {sum(numbers) / len(numbers):.6g}"
    return Shown(f"{total} numbers, {stats}: {head}, … {total - 12}, {tail}", f"{total - 12} of {total} numbers")


def as_table(items: Sequence[Any], total: int) -> Table | None:
    """A table if the items are objects of like keys, tuples of like length, or short scalars; None if not."""
    if len(items) >= 2 and all(isinstance(item, Mapping) for item in items):
        return _object_table(items, total)
    if len(items) >= 2 and all(isinstance(item, list) for item in items):
        return _tuple_table(items, total)
    if len(items) >= 4 and not any(isinstance(item, list | Mapping) for item in items):
        if all(isinstance(item, int | float) for item in items) and len(items) > 24:
            return None
        cells = [scalar(item) for item in items]
        if sum(map(len, cells)) / len(cells) > _LONG_TEXT_CHARS:
            return None
        return Table(("",), [(cell,) for cell in cells], total)
    return None


def _tuple_table(items: Sequence[list[Any]], total: int) -> Table | None:
    if all(len(item) >= 1 and all(isinstance(cell, Mapping) for cell in item) for item in items):
        flat = [{"group": str(i + 1), **cell} for i, item in enumerate(items) for cell in item]
        return _object_table(flat[:MAX_ROWS], len(flat)) if len(flat) >= 2 else None
    widths = {len(item) for item in items}
    width = max(widths)
    if not 1 <= width <= MAX_COLUMNS or len(widths) > 2:
        return None
    if any(isinstance(cell, list | Mapping) for item in items for cell in item):
        return None
    rows = [tuple(scalar(cell) for cell in item) + ("",) * (width - len(item)) for item in items]
    if max(map(len, rows[0])) > 4 * _LONG_TEXT_CHARS:
        return None
    return Table(("",) * width, rows, total)


def _object_table(items: Sequence[Mapping[str, Any]], total: int) -> Table | None:
    flat = [dict(_flatten(item)) for item in items]
    columns: dict[str, int] = {}
    for row in flat:
        for key in row:
            columns[key] = columns.get(key, 0) + 1
    filled = sum(columns.values())
    if not columns or len(columns) > MAX_COLUMNS or filled < 0.35 * len(columns) * len(flat):
        return None
    if sum(len(cell) for row in flat for cell in row.values()) / max(1, filled) > _LONG_TEXT_CHARS:
        return None
    names = tuple(columns)
    return Table(names, [tuple(row.get(name, "") for name in names) for row in flat], total)


def _flatten(item: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterable[tuple[str, str]]:
    for key, value in item.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and all(isinstance(child, Mapping) for child in value.values()):
            yield name, "{" + ", ".join(map(str, list(value)[:40])) + "}"
        elif isinstance(value, Mapping) and value and depth < 3 and len(value) <= 12:
            yield from _flatten(value, f"{name}.", depth + 1)
        elif isinstance(value, list | Mapping):
            yield name, inline(value)
        else:
            yield name, scalar(value)


def inline(value: Any, depth: int = 0) -> str:
    """A nested value in one line, bounded."""
    if isinstance(value, Mapping):
        if depth > 4:
            return f"{{{len(value)} keys}}"
        body = ", ".join(f"{key}: {inline(v, depth + 1)}" for key, v in list(value.items())[:40])
        return "{" + body + (", …}" if len(value) > 40 else "}")
    if isinstance(value, list):
        if depth > 4:
            return f"[{len(value)} items]"
        body = ", ".join(inline(v, depth + 1) for v in value[:40])
        return "[" + body + (", …]" if len(value) > 40 else "]")
    return scalar(value)


def _show_dict(value: Mapping[str, Any], limit: float, focus: Focus, meter: Meter, depth: int) -> Shown:
    leaves, blocks = _divide(value, meter, limit)
    lines = [_line(leaf) for leaf in leaves]
    leaf_cost = sum(meter.tokens(line) + 1 for line in lines)
    blocks_cost = sum(block.cost for block in blocks)
    names: list[str] = []
    if leaf_cost + blocks_cost > limit and blocks:
        blocks, names = _affordable(blocks, limit, focus)
        shares = _share(limit * (1 - _NAMES_SHARE if names else 1), leaf_cost, blocks, focus)
    else:
        shares = [limit, *(block.cost * 1.5 + 20 for block in blocks)]
    parts: list[str] = []
    notes: list[str] = []
    if lines:
        packed = pack(
            [Unit(line, _leaf_prior(leaf)) for line, leaf in zip(lines, leaves, strict=True)],
            shares[0],
            focus,
            meter,
            "fields",
        )
        parts.append(packed.text)
        if packed.kept < packed.total:
            notes.append(f"{packed.total - packed.kept} of {packed.total} fields")
    for block, share in zip(blocks, shares[1:], strict=True):
        shown = _show_block(block, share, focus, meter, depth)
        parts.append(shown.text)
        if shown.note:
            notes.append(f"{block.path}: {shown.note}" if block.path else shown.note)
    if names:
        table = Table(("",), [(name,) for name in names[:MAX_ROWS]], len(names))
        parts.append("others: " + lay(table, limit * _NAMES_SHARE - 2, focus, meter).text)
        notes.append(f"the content of {len(names)} parts")
    return Shown("\n".join(part for part in parts if part), "; ".join(notes[:4]))


def _affordable(blocks: list[_Block], limit: float, focus: Focus) -> tuple[list[_Block], list[str]]:
    """The blocks that can each have a useful share, those related to the hints first, and the names of the others."""
    most = max(1, int(limit * _EXPANDED_SHARE / (2 * _MIN_BLOCK_TOKENS)))
    if len(blocks) <= most:
        return blocks, []
    near = nearness([block.path for block in blocks], focus)
    ranked = sorted(range(len(blocks)), key=lambda i: (-near[i], blocks[i].path.count("."), i))
    kept = set(ranked[:most])
    return [b for i, b in enumerate(blocks) if i in kept], [b.path for i, b in enumerate(blocks) if i not in kept]


def _show_block(block: _Block, share: float, focus: Focus, meter: Meter, depth: int) -> Shown:
    size = f"{block.path}: {_size_of(block.value)}"
    if share < _MIN_BLOCK_TOKENS or depth >= _MAX_DEPTH:
        return Shown(size, _size_of(block.value)) if share >= 4 else Shown("", _size_of(block.value))
    shown = _show(block.value, share - meter.tokens(block.path) - 1, focus, meter, depth + 1)
    return Shown(f"{block.path}: {shown.text}", shown.note)


def _size_of(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{len(value)} keys}}"
    if isinstance(value, list):
        return f"[{len(value)} items]"
    return f"({len(value)} chars)"


def _line(leaf: _Leaf) -> str:
    return f"{leaf.path}: {leaf.value}"


def _leaf_prior(leaf: _Leaf) -> float:
    depth = leaf.path.count(".")
    last = leaf.path.rsplit(".", 1)[-1].lower()
    named = last in (
        "id",
        "name",
        "status",
        "state",
        "type",
        "title",
        "code",
        "message",
        "total",
        "count",
    ) or last.endswith("id")
    return (1.5 if named else 0.4) / (1 + 0.5 * depth) - (
        0.3 if leaf.value in ("", "null", "[]", "{}", "None") else 0.0
    )


def _divide(value: Mapping[str, Any], meter: Meter, limit: float) -> tuple[list[_Leaf], list[_Block]]:
    """Leaves of all small nested objects by path, and blocks: tables, lists, long texts."""
    leaves: list[_Leaf] = []
    blocks: list[_Block] = []
    outline = _weigh(value) > _OUTLINE * limit
    stack: list[tuple[str, Any, int]] = [("", value, 0)]
    while stack and len(leaves) < MAX_LEAVES:
        path, node, depth = stack.pop()
        if outline and depth and isinstance(node, Mapping) and _weigh(node) > _MIN_BLOCK_TOKENS:
            blocks.append(_Block(path, node, _weigh(node)))
            continue
        if isinstance(node, Mapping) and node and depth < _MAX_DEPTH:
            table = _table_of_dict(node, depth)
            if table is not None:
                blocks.append(_Block(path or "entries", table, cost_of(table, meter)))
                continue
            pairs = sampled(list(node.items()))
            children = [(f"{path}.{key}" if path else str(key), child, depth + 1) for key, child in pairs]
            stack.extend(reversed(children))
        elif (isinstance(node, list) and node and not _short(node)) or (
            isinstance(node, str) and len(node) > _LONG_TEXT_CHARS
        ):
            blocks.append(_Block(path, node, cost_of(node, meter)))
        else:
            leaves.append(
                _Leaf(path, inline(node) if isinstance(node, list | Mapping) else " ".join(scalar(node).split()))
            )
    return leaves, blocks


def _weigh(value: Any) -> float:
    """About the tokens of all leaves below a value; stops counting at MAX_LEAVES."""
    stack = [value]
    chars = visited = 0
    while stack and visited < MAX_LEAVES:
        node = stack.pop()
        visited += 1
        if isinstance(node, Mapping):
            chars += sum(len(str(key)) for key in node)
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
        else:
            chars += len(str(node)) + 2
    return (chars + 4 * len(stack)) / 3.5


def _table_of_dict(node: Mapping[str, Any], depth: int) -> list[dict[str, Any]] | None:
    """A dict of like objects (id -> object) as rows with their key first."""
    if len(node) < 3 or not all(isinstance(child, Mapping) and child for child in node.values()):
        return None
    first = set(next(iter(node.values())))
    children = list(node.values())[:50]
    if not all(len(first & set(child)) * 2 > len(first | set(child)) for child in children):
        return None
    rows = [{"key": key, **child} for key, child in node.items()]
    return rows if as_table(sampled(rows), len(rows)) is not None else None


def _short(node: list[Any]) -> bool:
    return len(node) <= 8 and all(not isinstance(item, list | Mapping) and len(scalar(item)) <= 60 for item in node)


def cost_of(value: Any, meter: Meter) -> float:
    """About what the value costs when shown whole, from a bounded sample."""
    if isinstance(value, str):
        sample = value[:2_000]
        return meter.tokens(sample) * len(value) / max(1, len(sample))
    if isinstance(value, list):
        items = value[:: max(1, len(value) // 20)][:20]
        return sum(meter.tokens(inline(item)[:2_000]) for item in items) * len(value) / max(1, len(items)) * 0.7
    return meter.tokens(inline(value)[:4_000])


def _share(limit: float, leaf_cost: float, blocks: Sequence[_Block], focus: Focus) -> list[float]:
    """Water-filling: each part gets its cost or a fair share, weighted by relation to hints; leaves weigh double."""
    costs = [leaf_cost, *(block.cost + 6 for block in blocks)]
    weights = [2.0, *(1.0 + focus.weight(block.path) for block in blocks)]
    shares = [0.0] * len(costs)
    open_parts = [i for i, cost in enumerate(costs) if cost > 0]
    room = limit
    while open_parts:
        total = sum(weights[i] for i in open_parts)
        done = [i for i in open_parts if costs[i] <= room * weights[i] / total]
        if not done:
            for i in open_parts:
                shares[i] = room * weights[i] / total
            break
        for i in done:
            shares[i] = costs[i] * 1.1 + 2
            room -= costs[i]
        open_parts = [i for i in open_parts if i not in set(done)]
    return shares
