"""The recorded conversations and the definition of a fact in them, which lie beside the repository."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SHARED = Path(__file__).resolve().parents[1] / ".." / "shared"


def definition() -> ModuleType:
    """What a fact is. Ends the program with a clear message where the data is absent."""
    path = SHARED / "tools" / "context_facts.py"
    if not path.exists():
        sys.exit(f"no recorded conversations: {path} is absent; they lie beside the repository in ../shared")
    spec = importlib.util.spec_from_file_location("context_facts", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
