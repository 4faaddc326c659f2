"""Facts of a session: values of older history that a later turn really uses again.

A value is an e-mail address, URL, path, file name, date, hexadecimal number, number of three digits or more, an
identifier (a word with a digit, an underscore or an inner capital) or a short quoted string; a short argument of a
call is one as a whole. At an assistant message, its values are facts if they stand, as whole words, in a user or tool
message before the last two rounds and nowhere in those two rounds: the agent cannot have them from what it just read.

Pure. Invariant: names of tools are never facts; of two facts of which one stands inside the other only the longer
counts, unless the longer is a mere quotation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RECENT_ROUNDS = 2
_EXTENSIONS = (
    r"py|pyx|pyi|js|ts|tsx|jsx|json|jsonl|md|rst|txt|csv|tsv|cfg|toml|ini|yaml|yml|sh|c|h|cc|cpp|hpp|rs|go|java|rb|html|"
    r"css|xml|sql|log|pdf|png|jpg|zip|tar|gz|db|exe|bin|out|lock|docx|xlsx|pem|enc|pcap"
)
_THREE_ALNUM = re.compile(r"[A-Za-z0-9]{3}")
_INNER_CAPITAL = re.compile(r"[a-z][A-Z]")
_TWO_LETTERS = re.compile(r"[A-Za-z]{2}")


def _always(_: str) -> bool:
    return True


def _is_path(text: str) -> bool:
    return len(text) >= 5 and "/" in text and _TWO_LETTERS.search(text) is not None


def _is_number(text: str) -> bool:
    return sum(c.isdigit() for c in text) >= 3


def _is_identifier(text: str) -> bool:
    core = text.strip("_-")
    if len(text) < 4 or text.isdigit() or not any(c.isalpha() for c in core):
        return False
    return any(c.isdigit() for c in core) or "_" in core or _INNER_CAPITAL.search(core) is not None


def _is_quotation(text: str) -> bool:
    return _THREE_ALNUM.search(text) is not None


@dataclass(frozen=True, slots=True)
class _Kind:
    """A form of value. `accept` judges what the pattern found, after `trim` was cut from its end."""

    name: str
    pattern: re.Pattern[str]
    accept: Callable[[str], bool] = _always
    trim: str = ""

    def found(self, text: str) -> Iterator[str]:
        for match in self.pattern.finditer(text):
            whole = next((group.strip() for group in match.groups() if group is not None), match.group())
            value = whole.rstrip(self.trim) if self.trim else whole
            if len(value) >= 3 and self.accept(value):
                yield value


_KINDS = (
    _Kind("email", re.compile(r"[\w+.-]+@[\w-]+\.[\w.-]*\w")),
    _Kind("url", re.compile(r"https?://[^\s<>\"'\])},]+[/\w]")),
    _Kind(
        "path",
        re.compile(
            r"(?<![/\w:.])(?:~|\.\.?)?/(?:[@\w.+-]+/)*[@\w.+-]*\w"  # from a root, a home or the current folder
            r"|(?<![/\w.:-])[\w.-]+(?:/[\w.-]+)+\w"
        ),
        _is_path,
    ),
    _Kind("file", re.compile(rf"(?<![/\w.-])[\w-]+(?:\.[\w-]+)*\.(?:{_EXTENSIONS})(?!\w)")),
    _Kind(
        "date",
        re.compile(
            r"(?<!\d)\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d)?)?(?!\d)" r"|(?<![/\d])\d\d?/\d\d?/\d{2,4}(?![/\d])"
        ),
    ),
    _Kind("hex", re.compile(r"(?<!\w)(?:0x[\da-fA-F]+|(?=[\da-f]*[0-9])(?=[\da-f]*[a-f])[0-9a-f]{6,})(?!\w)")),
    _Kind("number", re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?!\w|[-/]\d)"), _is_number, trim=","),
    _Kind("identifier", re.compile(r"(?<!\w)[A-Za-z0-9_]+(?:-[A-Za-z0-9_]+)*(?!\w)"), _is_identifier),
    _Kind(
        "quotation", re.compile(r"\"([^\n\"]{3,60})\"|'([^\n']{3,60})'|`([^\n`]{3,60})`"), _is_quotation
    ),
)  # fmt: skip


def values(text: str, *, argument: bool = False) -> dict[str, str]:
    """Value -> kind. `argument`: the text is one argument of a call."""
    kinds: dict[str, str] = {}
    for kind in _KINDS:
        for value in kind.found(text):
            kinds.setdefault(value, kind.name)
    whole = text.strip()
    if argument and 3 <= len(whole) <= 60 and "\n" not in text and _is_quotation(text):
        kinds.setdefault(whole, "quotation")
    return kinds


def has(text: str, value: str) -> bool:
    """True if a value stands in a text as a whole word."""
    if value not in text:
        return False
    before = r"(?<!\w)" if _is_word(value[0]) else ""
    after = r"(?!\w)" if _is_word(value[-1]) else ""
    return re.search(before + re.escape(value) + after, text) is not None


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message's content."""
    content = message.get("content")
    if not isinstance(content, list):
        return content or ""
    parts = (p if isinstance(p, str) else p.get("text") or p.get("content") or "" for p in content)
    return "\n".join(part if isinstance(part, str) else json.dumps(part) for part in parts)


def arguments(message: Mapping[str, Any]) -> Iterator[str]:
    """Each scalar argument of a message's calls, as text; arguments that are not JSON as they are."""
    for call in message.get("tool_calls") or ():
        sent = call["function"].get("arguments")
        try:
            yield from _scalars(json.loads(sent) if isinstance(sent, str) else sent)
        except ValueError:
            yield sent


def _scalars(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _scalars(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _scalars(inner)
    elif isinstance(value, str):
        yield value
    elif value is not None and not isinstance(value, bool):
        yield json.dumps(value)


def view(messages: Sequence[Mapping[str, Any]]) -> str:
    """All that a model can read in some messages."""
    lines: list[str] = []
    for message in messages:
        lines.append(text_of(message))
        for call in message.get("tool_calls") or ():
            sent = call["function"].get("arguments")
            lines.append(sent if isinstance(sent, str) else json.dumps(sent, ensure_ascii=False))
        lines.extend(arguments(message))
    return "\n".join(lines)


def facts(messages: Sequence[Mapping[str, Any]], at: int, tool_names: Collection[str]) -> dict[str, str]:
    """Value -> kind of the facts that the assistant message at index `at` uses."""
    rounds = [i for i in range(at) if messages[i]["role"] == "assistant"]
    if len(rounds) < RECENT_ROUNDS:
        return {}
    recent_from = rounds[-RECENT_ROUNDS]
    older = "\n".join(text_of(m) for m in messages[:recent_from] if m["role"] in {"tool", "user"})
    recent = view(messages[recent_from:at])
    used = values(text_of(messages[at]))
    for argument in arguments(messages[at]):
        for value, kind in values(argument, argument=True).items():
            used.setdefault(value, kind)
    found = {v: k for v, k in used.items() if v not in tool_names and has(older, v) and not has(recent, v)}
    holders = [value for value, kind in found.items() if kind != "quotation"]
    return {v: k for v, k in found.items() if not any(v != h and has(h, v) for h in holders)}
