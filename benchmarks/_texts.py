"""Passages of novels (../shared/data/texts): running prose that no model was asked to write."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

TEXTS = Path(__file__).resolve().parents[1] / ".." / "shared" / "data" / "texts"


def passages(count: int, chars: int) -> Iterator[list[str]]:
    """The whole sentences of so many pieces of `chars`, from all novels in turns. Ends the program with a clear message
    where there are none."""
    if not TEXTS.is_dir():
        sys.exit(f"no texts: {TEXTS} is absent; they lie beside the repository in ../shared")
    novels = [path.read_text(errors="replace") for path in sorted(TEXTS.glob("*.txt"))]
    for number in range(count):
        novel = novels[number % len(novels)]
        start = (len(novel) // 3 + number * 3 * chars) % (len(novel) - chars)
        yield novel[start : start + chars].split(". ")[1:-1]
