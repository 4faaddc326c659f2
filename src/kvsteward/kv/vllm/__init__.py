"""kvsteward inside vLLM: a KV connector that keeps the KV of paused agent sessions by what they are worth.

Needs nothing but the standard library and vLLM itself. `compat` is the only module that touches vLLM's internals.
"""
