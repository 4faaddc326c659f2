"""HTML as text: headings, links, tables, lists and ids stay; scripts, styles and navigation go.

It does not render. Invariant: linear; the parser is bounded by MAX_CHARS of source.
"""

from __future__ import annotations

import re

from selectolax.lexbor import LexborHTMLParser, LexborNode

from kvsteward.context.distill.base import CountTokens, Distillate, Distiller, Hints
from kvsteward.context.distill.lines import wrapped
from kvsteward.context.distill.meter import calibrated
from kvsteward.context.distill.pack import Unit, pack
from kvsteward.context.distill.salience import focus_of

MAX_CHARS = 600_000
MAX_NODES = 60_000
_HEAD_CHARS = 3_000
_DROPPED = ("script", "style", "noscript", "svg", "template", "iframe", "head > link", "head > meta")
_CHROME = frozenset({"nav", "footer", "aside"})
_BLOCK = frozenset(
    [
        "p",
        "div",
        "section",
        "article",
        "main",
        "header",
        "li",
        "dt",
        "dd",
        "tr",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "pre",
        "blockquote",
        "table",
        "ul",
        "ol",
        "dl",
        "form",
        "br",
        "hr",
        "title",
        "figcaption",
        "option",
        "label",
        "button",
        "caption",
        "body",
        "nav",
        "footer",
        "aside",
        "summary",
        "details",
    ]
)
_TAG = re.compile(r"<(?:!doctype html|html|head|body|div|table|ul|p|h[1-6]|a|span|form)[\s>]", re.IGNORECASE)
_LINE_CHARS = 600
_MAX_OPEN = 400
_OPEN = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9]{0,15})")
_ANY_TAG = re.compile(r"<[^<>]{0,4000}>")
_OPTIONAL_END = ("p", "li", "td", "th", "tr", "dt", "dd", "option", "optgroup", "tbody", "thead")
_VOID = ("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr")
_SELF_CLOSED = frozenset(_OPTIONAL_END + _VOID)


class Html(Distiller):
    """A page or a fragment of one."""

    kind = "html"

    def matches(self, text: str) -> bool:
        head = text[:_HEAD_CHARS]
        return head.lstrip()[:1] == "<" and len(_TAG.findall(head)) >= 2

    def distil(self, text: str, limit_tokens: int, hints: Hints, count: CountTokens) -> Distillate | None:
        units = page_units(text[:MAX_CHARS])
        if not units:
            return None
        packed = pack(units, limit_tokens, focus_of(hints), calibrated(text, count), "lines")
        return Distillate(
            self.kind, packed.text, f"markup; {packed.total - packed.kept} of {packed.total} lines of text"
        )


def page_units(html: str) -> list[Unit]:
    """The page's lines of text, headings marked with #, cells joined with |, targets of links in brackets."""
    if _open_depth(html) > _MAX_OPEN:
        return [Unit(line) for line in wrapped(_ANY_TAG.sub("\n", html)) if line.strip()]
    parser = LexborHTMLParser(html)
    parser.strip_tags(list(_DROPPED[:6]))
    root = parser.root
    if root is None:
        return []
    lines = _Lines()
    for number, node in enumerate(root.traverse(include_text=True)):
        if number >= MAX_NODES:
            break
        lines.take(node)
    lines.end()
    return lines.units


def _open_depth(html: str) -> int:
    """How many elements are open at most. The parser's time grows with the square of that, so it must be bounded."""
    depth = deepest = 0
    for closing, name in _OPEN.findall(html):
        if name.lower() not in _SELF_CLOSED:
            depth = max(0, depth - 1) if closing else depth + 1
            deepest = max(deepest, depth)
    return deepest


class _Lines:
    """Collects text until a block begins."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self._parts: list[str] = []
        self._mark = ""
        self._prior = 0.0

    def take(self, node: LexborNode) -> None:
        tag = node.tag
        if tag == "-text":
            text = " ".join((node.text_content or "").split())
            if text:
                self._parts.append(text)
        elif tag in ("td", "th"):
            self._parts.append("|")
        elif tag in _BLOCK:
            self.end()
            self._begin(node, tag or "")
        elif tag == "a":
            self._target(node.attributes.get("href"))
        elif tag in ("img", "input"):
            self._described(node)

    def _begin(self, node: LexborNode, tag: str) -> None:
        self._mark, self._prior = "", 0.2
        if tag[:1] == "h" and tag[1:].isdigit():
            self._mark, self._prior = "#" * int(tag[1:]) + " ", 2.5 - 0.3 * int(tag[1:])
        elif tag == "title":
            self._mark, self._prior = "title: ", 3.0
        elif tag == "li":
            self._mark = "- "
        elif tag in _CHROME:
            self._prior = -0.5
        name = node.attributes.get("id")
        if name and len(name) <= 60 and tag not in ("div", "section", "body", "tr", "p"):
            self._mark += f"#{name} "

    def _target(self, href: str | None) -> None:
        if href and not href.startswith(("#", "javascript:")) and len(href) <= 200:
            self._parts.append(f"[{href}]")

    def _described(self, node: LexborNode) -> None:
        told = [node.attributes.get(name) for name in ("alt", "name", "value", "placeholder")]
        text = " ".join(t for t in told if t)[:120]
        if text:
            self._parts.append(f"({text})")

    def end(self) -> None:
        text = " ".join(self._parts).strip("| ").replace("| |", "|")
        self._parts.clear()
        if text:
            for at in range(0, len(text), _LINE_CHARS):
                self.units.append(Unit(self._mark * (at == 0) + text[at : at + _LINE_CHARS], self._prior))
