"""kvsteward keeps long LLM-agent sessions inside a fixed KV-cache budget."""

__version__ = "0.1.0"
